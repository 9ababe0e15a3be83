# make demo and make test need nothing but Python >= 3.11 and make; the first run installs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that has run out of tests takes over some of another's: files and tests differ much in length.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
STAMP := $(VENV)/.installed
# Tests start hundreds of processes, and without compiled modules each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# What the native library is built from; the folders, because a file may also be removed.
NATIVE := csrc csrc/kernels $(wildcard csrc/*.[ch] csrc/kernels/*.[ch] build_backend/*.py) setup.py

# How long `make explore` goes on starting rounds; a round takes some minutes.
EXPLORE_S := 1200

.PHONY: help venv install demo experiments docs test test-torch test-triton test-browser test-slow explore test-clients lint format types check clean

help:
	@echo "make demo       serve two real models from one engine and measure a burst of prompts"
	@echo "make experiments  list the papers' experiments, which python -m experiments NAME simulates"
	@echo "make test       run the tests, without the slow ones and with few examples of each property"
	@echo "make test-torch run the executor's tests that depend on the native library without it"
	@echo "make test-triton  run the GPU's kernels in Triton's interpreter and compile them; needs no GPU"
	@echo "make test-browser  visit the server's page in a browser; needs Chromium (Debian: apt install chromium)"
	@echo "make test-slow  run the slow tests, and the property tests with more examples"
	@echo "make explore    search with new examples of the property tests, 20 minutes (EXPLORE_S=60)"
	@echo "make docs       build the documentation as a site into site/; any warning fails"
	@echo "make test-clients  run other projects' clients against a server; installs them, gigabytes"
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

experiments: $(STAMP)
	$(BIN)/python -m experiments --list

# QUICK chooses the tests. A browser's driver leaves an event loop running in its process, beside which other tests cannot start theirs.
QUICK := not slow
test: $(STAMP)
	$(PYTEST) -m "$(QUICK)" --ignore=tests/browser

test-torch: $(STAMP)
	SHOAL_NATIVE=off $(PYTEST) -m "not slow and not without_native" tests/execute

# Triton is 700 MB that torch for CUDA brings along, and that nothing needs on CPUs but tests of its kernels: so it
# lies apart, where nothing else sees it. What it has compiled is kept until sources change.
TRITON := .triton
$(TRITON)/.installed: constraints.txt | $(STAMP)
	rm -rf $(TRITON)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $< --target $(TRITON)/packages triton
	@touch $@

# A process either interprets kernels or compiles them.
INTERPRETED := tests/execute/test_execute_strict_interpreter.py
INTERPRETED += $(wildcard tests/execute/test_execute_gpu_*.py)
INTERPRETED += tests/end_to_end/test_gpu_engines.py
COMPILED := tests/execute/test_execute_triton_compile.py
WITH_TRITON := PYTHONPATH=$(CURDIR)/$(TRITON)/packages TRITON_CACHE_DIR=$(CURDIR)/$(TRITON)/cache
test-triton: $(TRITON)/.installed
	$(WITH_TRITON) TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(INTERPRETED)
	$(WITH_TRITON) $(BIN)/python -m pytest -m "not slow" $(COMPILED)

# Playwright brings its driver along, but the browser is the system's.
$(VENV)/.browser: constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $< playwright axe-playwright-python
	@touch $@

test-browser: $(VENV)/.browser
	$(PYTEST) tests/browser

test-slow: $(TRITON)/.installed
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=more
	$(WITH_TRITON) TRITON_INTERPRET=1 $(PYTEST) -m hypothesis --hypothesis-profile=more $(INTERPRETED)
	$(WITH_TRITON) $(PYTEST) -m slow $(COMPILED)

# What a round finds ends it. Its seed repeats the round: --hypothesis-seed=SEED
explore: $(STAMP)
	end=$$(($$(date +%s) + $(EXPLORE_S))); \
	while seed=$$(date +%s); test $$seed -lt $$end; do \
		echo "seed $$seed"; \
		$(PYTEST) -m hypothesis --hypothesis-profile=explore --hypothesis-seed=$$seed || exit 1; \
	done

# Clients of other projects, in virtual environments of their own because not all go together; the server is
# that of .venv, at its defaults.
CLIENTS := .venv-clients
CLIENT_SETS := openai2 aiperf vllm
PIP_INSTALL := bin/python -m pip install --disable-pip-version-check --quiet
run_clients = SHOAL_COMMAND=$(CURDIR)/$(BIN)/shoal $(1)/bin/python -m pytest --confcutdir=tests/clients \
	$(patsubst %,tests/clients/test_%.py,$(2))

$(CLIENTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/$(PIP_INSTALL) -c constraints.txt -e '.[clients]'
	@touch $@

$(CLIENTS)-%/.installed: tests/clients/requirements-%.txt
	$(PYTHON) -m venv $(CLIENTS)-$*
	$(CLIENTS)-$*/$(PIP_INSTALL) -r $<
	if [ $* = vllm ]; then $(CLIENTS)-$*/bin/python tests/clients/rename_vllm.py; fi
	@touch $@

test-clients: $(STAMP) $(CLIENTS)/.installed $(CLIENT_SETS:%=$(CLIENTS)-%/.installed)
	$(call run_clients,$(CLIENTS),openai anthropic langchain pydantic_ai openai_agents llm ollama guidellm lm_eval)
	$(call run_clients,$(CLIENTS)-openai2,litellm llama_index instructor)
	$(call run_clients,$(CLIENTS)-aiperf,aiperf)
	$(call run_clients,$(CLIENTS)-vllm,vllm_bench)

$(VENV)/.docs: constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $< zensical
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/zensical build --clean --strict -f mkdocs.yml

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

check: lint types docs test test-torch test-triton test-browser test-slow

clean:
	rm -rf $(VENV) $(CLIENTS) $(CLIENT_SETS:%=$(CLIENTS)-%) $(TRITON) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/shoal/native/libshoal.so src/shoal/native/build.json
