"""Benchmarks print their measurements when Ctrl-C ends them; small runs of those that only simulate."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import many_models

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


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Invocations of three functions, one of them popular, and short answers."""
    for file, lines in (
        (many_models.FUNCTIONS, ["app,func,end_timestamp,duration", *["a,f,1,1"] * 6, "a,g,1,1", "b,f,1,1"]),
        (many_models.LENGTHS, ["conv,n_turns,prompt_tokens,output_tokens", "0,2,100,30", "1,2,4000,4000"]),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("\n".join(lines) + "\n")
    return tmp_path


def many(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["many_models", *map(str, arguments)])
    many_models.main()


def test_many_models_are_skipped_without_their_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many(monkeypatch, "--traces", tmp_path, "--quick")
    assert capsys.readouterr().out.startswith(f"skipped: {tmp_path} has no azure_functions_sample")


def test_many_models_have_a_row_for_each_policy(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = traces / "found.csv"
    few = ["--traces", traces, "--devices", "a100-80", "--models", 2, 6, "--seconds", 20, "--rate", 0.2]
    many(monkeypatch, *few, "--policies", "resident", "fcfs", "--csv", file)
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["models"], row["policy"]) for row in rows] == [
        ("2", "resident"),
        ("2", "fcfs"),
        ("6", "fcfs"),
    ]
    assert rows[0]["fetches"] == "0"
    assert all(row["answered"] == row["requests"] != "0" for row in rows)
    assert int(rows[2]["evictions"]) > 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(rows)


def test_popular_models_are_asked_more(traces: Path) -> None:
    shares = many_models.popularity(traces / many_models.FUNCTIONS, 6)
    assert sorted(shares) == pytest.approx([1 / 16] * 4 + [6 / 16] * 2)
