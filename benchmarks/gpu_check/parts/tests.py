"""The part `tests` of `benchmarks/gpu_check`: tests of the executor and of whole engines, on the device.

They compare tiny models in float32 with `transformers`: recorded decodes, two plans in flight, all ways of
sampling, services that come and go, preemptions, sliding windows behind prompts that are longer than those.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_check.cases import Cases
from benchmarks.gpu_check.part_list import ROOT, missing
from benchmarks.gpu_check.pytest_plugin import FILE_VARIABLE

TESTS = (
    "tests/execute/test_execute_triton.py",
    "tests/execute/test_execute_equality.py",
    "tests/end_to_end/test_equality_tiny.py",
    "tests/execute/test_execute_iterations.py",
    "tests/end_to_end/test_services.py",
    "tests/execute/test_execute_swap.py",
    "tests/execute/test_execute_failures.py",
    "tests/end_to_end/test_co_batching.py",
    "tests/end_to_end/test_iterations.py",
    "tests/end_to_end/test_equality_presets.py",
)
TINY_TESTS = ("tests/execute/test_execute_iterations.py::test_iterations_are_steps_one_after_another",)
# Bundled models are not there without a network, and asking for them takes time. Grammars need no device, but
# llguidance.
_CHOSEN = "not smollm2 and not grammars"
_OPTIONS = (
    "-m",
    "not slow",
    "-k",
    _CHOSEN,
    "-p",
    "no:cacheprovider",
    "-p",
    "benchmarks.gpu_check.pytest_plugin",
)
_WORKERS = 4
_END_S = 3.0
"""To say what came of it."""
_WHOLE = (0, 1)
"""Exit statuses of pytest after it has run all tests."""


def run(cases: Cases, tests: Sequence[str] | None = None) -> None:
    """tests: in place of those that it is for."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        told.touch()
        status = _pytest(cases, tests or (TINY_TESTS if cases.tiny else TESTS), told)
        outcomes = [json.loads(line) for line in told.read_text().splitlines()]
    files: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        files.setdefault(outcome["test"].partition("::")[0], Counter())[outcome["outcome"]] += 1
    for file, counted in files.items():
        cases.tell(file, "failed" if counted["failed"] else "ok", dict(counted))
    for outcome in outcomes:
        if outcome["outcome"] == "failed":
            cases.tell(outcome["test"], "failed", error=outcome["error"])
    _tell_all(cases, sum(files.values(), Counter()), status)


def _tell_all(cases: Cases, counted: Mapping[str, int], status: int | None) -> None:
    said = ", ".join(f"{number} {outcome}" for outcome, number in counted.items())
    if status is None:
        cases.tell("all", "cut", dict(counted), error="no time was left", line=said)
    elif status in _WHOLE and counted:
        cases.tell("all", "failed" if counted.get("failed") else "ok", dict(counted), line=said)
    else:
        cases.tell("all", "failed", error=f"pytest ended with status {status}", line=said)


def _pytest(cases: Cases, tests: Sequence[str], told: Path) -> int | None:
    """Its exit status; None where there was no time for all tests."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *tests]
    if not missing(["xdist"]):
        command += ["-p", "no:xdist"] if cases.tiny else ["-n", str(_WORKERS)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SHOAL_TEST_DEVICE": cases.device,
        FILE_VARIABLE: str(told),
    }
    environment.pop("CI", None)  # a test without a bundled model then fails
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=cases.left_s - _END_S).returncode
    except subprocess.TimeoutExpired:
        return None
