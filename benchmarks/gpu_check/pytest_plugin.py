"""pytest plugin of the part `tests` of `benchmarks.gpu_check`: records each test's outcome in a file."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FILE_VARIABLE = "GPU_CHECK_TESTS"
"""Environment variable that names the file, which gets one JSON object per line."""
_LONGEST_ERROR = 300


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    if report.when == "call" or report.outcome != "passed":
        _record(report.nodeid, report.outcome, report.longreprtext)


def pytest_collectreport(report: "pytest.CollectReport") -> None:
    if report.outcome == "failed":
        _record(report.nodeid, report.outcome, report.longreprtext)


def _record(test: str, outcome: str, text: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the controller process records it
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    error = " ".join(filter(None, errors)) or text.strip().rpartition("\n")[2]
    record = {"test": test, "outcome": outcome, "error": error[:_LONGEST_ERROR]}
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(record) + "\n")
