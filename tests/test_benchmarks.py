"""Benchmarks print their measurements when Ctrl-C ends them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = """\
from rich.table import Table
from benchmarks.interrupts import print_at_end

table = Table("measured")
with print_at_end(table):
    table.add_row("one")
    raise {error}
    table.add_row("two")
"""


@pytest.mark.parametrize(("error", "status"), [("KeyboardInterrupt", 130), ("ValueError('bug')", 1)])
def test_rows_are_printed_after_ctrl_c_and_not_after_errors(error: str, status: int) -> None:
    command = [sys.executable, "-c", ROWS.format(error=error)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert ("one" in done.stdout, "two" in done.stdout) == (status == 130, False)
