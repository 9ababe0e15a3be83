"""``python -m experiments``: the list, tables, JSON and pictures."""

import dataclasses
import json
import math
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

import experiments
from experiments import REPRODUCTIONS, Reproduction, Result, Row, between
from experiments.command import app
from experiments.report import format_value, result_tables
from shoal.cli.app import run
from shoal.measure import Panel, Series

runner = CliRunner()
ROWS = (
    Row(
        config={"rate": 10.0, "system": "ours"},
        metrics={"mean_s": 1234.5, "share": 0.25},
        paper={"share": 0.5},
    ),
    Row(
        config={"rate": 20.0, "system": "theirs"},
        metrics={"mean_s": math.nan},
        paper=between("mean_s", 1, 2.5),
    ),
)


def fake(name):
    def go(effort):
        seen = list(effort.each(name, [1, 2]))
        panel = Panel(title="t", x_label="x", y_label="y", series=[Series("a", [1, 2], [1, 2])])
        lines = [f"quick is {effort.quick}", f"saw {seen}"]
        return Result(name=name, paper="Somebody", assumptions=lines, rows=ROWS, panels=[[panel]])

    return Reproduction(name=name, paper="Somebody, Table 1", measures="what it measures", run=go)


@pytest.fixture
def fakes(monkeypatch):
    known = {name: fake(name) for name in ("first", "second")}
    monkeypatch.setattr(experiments, "REPRODUCTIONS", known)
    monkeypatch.setattr(experiments, "find", lambda names: [known[name] for name in names])
    return known


def call(*arguments):
    result = runner.invoke(app, list(arguments), catch_exceptions=False, terminal_width=100)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_the_list_names_every_experiment(fakes, arguments):
    printed = call(*arguments).stdout
    for name in fakes:
        assert name in printed
    assert printed.count("what it measures") == 2


def test_the_real_list_names_every_reproduction():
    words = set(re.findall(r"[\w-]+", call("--list").stdout))
    assert words >= set(REPRODUCTIONS)


def test_the_papers_figures_are_printed_below_ours(fakes):
    lines = [line.split() for line in call("first").stdout.splitlines() if line.strip()]
    start = lines.index(["10", "ours", "1234", "0.25"])
    assert lines[start + 1 : start + 4] == [["paper", "0.5"], ["20", "theirs", "-"], ["paper", "1..2.5"]]
    assert ["-", "quick", "is", "False"] in lines
    assert ["-", "saw", "[1,", "2]"] in lines
    assert "rougher" not in call("first").stdout


def test_quick_says_so(fakes):
    printed = call("first", "--quick").stdout
    assert "quick: smaller than the real one" in printed
    assert "quick is True" in printed


def test_json_of_one_is_an_object_and_of_several_a_list(fakes, tmp_path):
    single, both = tmp_path / "one.json", tmp_path / "both.json"
    call("first", "--json", str(single))
    call("second", "first", "second", "--quick", "--json", str(both))
    written = json.loads(single.read_text())
    assert written.keys() == {"name", "paper", "quick", "assumptions", "rows"}
    assert [written["quick"], *(result["quick"] for result in json.loads(both.read_text()))] == [
        False,
        True,
        True,
    ]
    assert written["rows"][1] == {
        "config": {"rate": 20.0, "system": "theirs"},
        "metrics": {"mean_s": None},
        "paper": {"mean_s_least": 1, "mean_s_most": 2.5},
    }
    assert [result["name"] for result in json.loads(both.read_text())] == ["second", "first"]


def test_all_runs_every_experiment_that_is_simulated(fakes, tmp_path):
    fakes["real"] = dataclasses.replace(fake("real"), real=True)
    path = tmp_path / "all.json"
    call("all", "--json", str(path))
    assert [result["name"] for result in json.loads(path.read_text())] == ["first", "second"]


def test_pictures_are_written_into_a_folder(fakes, tmp_path):
    pytest.importorskip("matplotlib")
    call("first", "second", "--plot", str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"first.png", "second.png"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["scls-throughputs"], "did you mean 'scls-throughput'"),
        (["nothing"], "python -m experiments --list"),
        (["scls-throughput", "--json", "/no/such/folder/a.json"], "there is no folder /no/such/folder"),
        (["scls-throughput", "--plot", "/dev/null/a"], "cannot write into /dev/null/a"),
        (["all", "--plot", "-"], "pictures and folders cannot go to standard output"),
    ],
)
def test_mistakes_are_one_red_line_and_exit_code_2(arguments, expected, capsys):
    assert run(list(arguments), app) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_tables_fit_the_terminal_and_lose_nothing(width):
    names = [f"a_rather_long_metric_{n}" for n in range(9)]
    rows = [
        Row(config={"engine": "hf"}, metrics={name: 1000.0 + n for n, name in enumerate(names)}),
        Row(config={"engine": "ds"}, metrics={}, paper=between(names[3], 0.123, 0.456)),
    ]
    tables = result_tables(Result(name="n", paper="p", assumptions=[], rows=rows), width)
    console = Console(width=width, record=True)
    for table in tables:
        console.print(table)
    printed = console.export_text()
    assert all(len(line) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert all(str(1000 + n) in printed for n in range(9))
    assert "0.123..0.456" in printed
    assert len(tables) == 1 if width == 200 else len(tables) > 1


def test_values_are_short():
    cases = [
        (1234.5, "1234"),
        (0.12345, "0.123"),
        (7, "7"),
        (None, "-"),
        (math.nan, "-"),
        ("x", "x"),
        (True, "True"),
    ]
    assert [format_value(value) for value, _ in cases] == [text for _, text in cases]


def test_a_real_experiment_runs(tmp_path):
    path = tmp_path / "real.json"
    printed = call("uellm-batching", "--quick", "--json", str(path)).stdout
    assert "slo-odbs" in printed
    assert "0.874" in printed
    assert json.loads(path.read_text())["name"] == "uellm-batching"


def test_help_has_examples():
    output = runner.invoke(app, ["--help"], terminal_width=200).output
    assert "Examples:" in output
    assert output.count("python -m experiments") >= 3
