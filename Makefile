# make demo and make test need nothing but Python >= 3.11 and make; the first run installs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that has run out of tests takes over some of another's: files and tests differ much in length.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
STAMP := $(VENV)/.installed
# What the native library is built from; the folders, because a file may also be removed.
NATIVE := csrc csrc/kernels $(wildcard csrc/*.[ch] csrc/kernels/*.[ch] build_backend/*.py) setup.py

.PHONY: help venv install demo test test-torch test-slow lint format types check clean

help:
	@echo "make demo       serve two real models from one engine and measure a burst of prompts"
	@echo "make test       run the tests, without the slow ones and with few examples of each property"
	@echo "make test-torch run the executor's tests without the native library"
	@echo "make test-slow  run the slow tests, and the property tests with all their examples"
	@echo "make lint       ruff and import-linter"
	@echo "make types      mypy --strict"
	@echo "make check      lint, types and all tests"
	@echo "make install    only set up .venv (PYTHON=python3.12 chooses the interpreter)"

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Shoal needs Python 3.11 or newer; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

venv install: $(STAMP)

demo: $(STAMP)
	$(BIN)/shoal demo

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-torch: $(STAMP)
	SHOAL_NATIVE=off $(PYTEST) -m "not slow" tests/execute

test-slow: $(STAMP)
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test test-torch test-slow

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/shoal/native/libshoal.so src/shoal/native/build.json
