"""A plugin of pytest for the part `tests` of `benchmarks/gpu_check`: tells what came of each test."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FILE_VARIABLE = "GPU_CHECK_TESTS"
"""Of the environment: names the file for it, which gets one JSON object a line."""
_LONGEST_ERROR = 300


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """A test was set up, run or torn down, here or in a worker of this process."""
    if report.when == "call" or report.outcome != "passed":
        _tell(report.nodeid, report.outcome, report.longreprtext)


def pytest_collectreport(report: "pytest.CollectReport") -> None:
    """A file was read."""
    if report.outcome == "failed":
        _tell(report.nodeid, report.outcome, report.longreprtext)


def _tell(test: str, outcome: str, text: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started this one is told, too
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    error = errors[0] if errors else text.strip().rpartition("\n")[2]
    record = {"test": test, "outcome": outcome, "error": error[:_LONGEST_ERROR]}
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(record) + "\n")
