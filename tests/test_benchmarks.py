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


def test_the_heaviest_load_that_is_served() -> None:
    for count in range(7):
        for served in range(count + 1):

            def share(at: int, served: int = served) -> float:
                return 1 - at / 100 if at < served else 0.5

            place, enough, less = many_models.most(share, count)
            assert place == served - 1
            assert enough == (1.0 if place < 0 else share(place))
            assert less == (0.5 if served < count else 0.0)


def test_a_capacity_is_that_of_the_heaviest_load_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request/s in all a tenth of the tokens are late, and of two a fifth."""
    monkeypatch.setattr(many_models, "on_time", lambda point: 1 - 0.1 * point.models * point.rate)
    point = many_models.Point("a100-80", 0, "turns", 0.0, 1.0, 0.6, 0, Path())
    assert many_models.capacity(point, 100) == (10, pytest.approx(1.0))


def test_capacities_have_a_row_for_each_policy(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few requests, which are all in time."""
    monkeypatch.setattr(many_models, "MODEL_COUNTS", (2, 4))
    monkeypatch.setattr(many_models, "RATES", (0.01, 0.02))
    few = ["--traces", traces, "--devices", "a100-80", "--requests", 5, "--jobs", 1]
    many(monkeypatch, *few, "--capacity", "--policies", "resident", "one-at-a-time")
    assert capsys.readouterr().out.splitlines() == [
        "| device | policy | models at 0.1/s each | requests/s for 20 models |",
        "|---|---|---:|---:|",
        "| a100-80 | one-at-a-time | 4 | 0.40 |",
    ]
