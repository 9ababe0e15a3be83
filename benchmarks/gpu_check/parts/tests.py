"""GPU check, part `tests`: pytest suites of the executor and of whole engines on the device.

They compare tiny models in float32 with `transformers`: recorded decodes, two plans in flight, sampling,
added and removed services, preemptions, sliding windows with longer prompts.
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
TINY_TESTS = ("tests/execute/test_execute_iterations.py::test_iterations_are_successive_steps",)
# Bundled models need a network, and grammars need llguidance but no device.
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
_WORKERS = 8
_END_S = 3.0
"""Time reserved for recording the results."""
_COMPLETE = (0, 1)
"""Exit statuses of pytest after a complete run."""


def run(cases: Cases, tests: Sequence[str] | None = None) -> None:
    """tests: instead of ``TESTS``."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        records.touch()
        status = _pytest(cases, tests or (TINY_TESTS if cases.tiny else TESTS), records)
        outcomes = [json.loads(line) for line in records.read_text().splitlines()]
    files: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        files.setdefault(outcome["test"].partition("::")[0], Counter())[outcome["outcome"]] += 1
    for file, counted in files.items():
        cases.report(file, "failed" if counted["failed"] else "ok", dict(counted))
    for outcome in outcomes:
        if outcome["outcome"] == "failed":
            cases.report(outcome["test"], "failed", error=outcome["error"])
    _report_all(cases, sum(files.values(), Counter()), status)


def _report_all(cases: Cases, counted: Mapping[str, int], status: int | None) -> None:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in counted.items())
    if status is None:
        cases.report("all", "cut", dict(counted), error="no time was left", line=counts)
    elif status in _COMPLETE and counted:
        cases.report("all", "failed" if counted.get("failed") else "ok", dict(counted), line=counts)
    else:
        cases.report("all", "failed", error=f"pytest ended with status {status}", line=counts)


def _pytest(cases: Cases, tests: Sequence[str], records: Path) -> int | None:
    """pytest's exit status; None: out of time."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *tests]
    if not missing(["xdist"]):
        command += ["-p", "no:xdist"] if cases.tiny else ["-n", str(_WORKERS)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SHOAL_TEST_DEVICE": cases.device,
        FILE_VARIABLE: str(records),
    }
    environment.pop("CI", None)  # with it, tests without a bundled model fail
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=cases.left_s - _END_S).returncode
    except subprocess.TimeoutExpired:
        return None
