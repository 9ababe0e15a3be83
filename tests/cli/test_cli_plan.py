"""``shoal plan``: its plan can be served, and a missing plan is reported."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.cli.plan_report import remarks
from shoal.config.scenario_file import load_scenario
from shoal.config.settings import load_config
from shoal.core import ConfigError
from shoal.plan.capacity import Plan
from shoal.plan.capacity import plan as search
from shoal.plan.catalog import load_catalogue
from shoal.plan.confidence import Interval
from shoal.plan.demand import build_demand
from shoal.plan.goals import PlanningOptions, parse_goals
from shoal.serve.options import ServerOptions
from small_searches import small_searches

runner = CliRunner()
CATALOGUE = """\
devices:
  - {name: a100-80, price: 1.8, most: 2}
  - {name: l40s, price: 0.9, most: 2}
"""
WORKLOAD = ["--workload", "sharegpt", "--rate", "6", "--requests", "60", "--trials", "1"]


def plan(folder: Path, goals: str, *flags: str) -> tuple[int, str]:
    (folder / "devices.yaml").write_text(CATALOGUE)
    service = f"chat=llama-3.1-8b,{goals}"
    arguments = ["plan", "--devices", str(folder / "devices.yaml"), "--service", service, *WORKLOAD, *flags]
    done = runner.invoke(app, arguments)
    return done.exit_code, done.output if done.exception is None else done.output + str(done.exception)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_searches():
        yield


class Planned(NamedTuple):
    """What the command came to."""

    shown: str
    """Its output, with single spaces."""
    out: Path
    """What it wrote for a server."""
    found: Path
    """Its figures."""
    report: Path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("planned")
    out, found, report = folder / "shoal.yaml", folder / "plan.json", folder / "plan.html"
    files = ["--out", str(out), "--json", str(found), "--html", str(report)]
    code, shown = plan(folder, "slo.ttft=1s", *files)
    assert code == 0, shown
    return Planned(" ".join(shown.split()), out, found, report)


def test_the_plan_reads_back_as_a_server_with_its_devices(planned: Planned) -> None:
    assert "Plan: 1 l40s" in planned.shown
    config = load_config(ServerOptions, file=planned.out)
    assert [service.name for service in config.services] == ["chat"]
    assert len(config.devices) == 1
    assert config.services[0].slo.ttft_s == 1
    assert json.loads(planned.found.read_text())["remarks"] == []


def test_the_report_says_what_the_terminal_says(planned: Planned) -> None:
    page = planned.report.read_text()
    [title] = re.findall(r"<title>(.*?)</title>", page)
    assert re.fullmatch(r"llama-3.1-8b on 1 l40s, [0-9.]+ requests/s", title)
    [verdict] = re.findall(r'class="verdict good.*?<span>(.*?)</span>', page)
    assert verdict.startswith("1 l40s for 1 service with ")
    assert verdict in planned.shown
    for words in (
        "Cost and attainment",
        "Time to first token (TTFT), held-out",
        "Fleets that were tried",
        "goal: 1.00 s",
    ):
        assert words in page
    assert not re.search(r"https?:|<script|<link", page)


def test_ignored_settings_of_engines_are_named(planned: Planned, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("engines: 3\nlatency: {roofline: {device: v100}}\n")
    code, shown = plan(tmp_path, "slo.ttft=1s", "--config", str(scenario))
    assert code == 0, shown
    assert "latency, engines: the plan says how many engines" in " ".join(shown.split())
    assert "not heeded" not in planned.shown


def test_remarks_are_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.plan_report.remarks", lambda *_: ["Not confirmed: 80%"])
    out, found = tmp_path / "shoal.yaml", tmp_path / "plan.json"
    code, shown = plan(tmp_path, "slo.ttft=1s", "--out", str(out), "--json", str(found))
    assert code == 0, shown
    assert "Not confirmed: 80%" in shown
    assert out.read_text().startswith("# Not confirmed: 80%\n# a server does not find llama-3.1-8b")
    assert json.loads(found.read_text())["remarks"] == ["Not confirmed: 80%"]


def test_a_model_without_known_weights_is_a_remark(planned: Planned) -> None:
    assert "a server does not find llama-3.1-8b" in planned.shown
    assert planned.out.read_text().startswith("# a server does not find llama-3.1-8b")
    assert "kv_memory" in planned.out.read_text()


def test_an_unservable_plan_is_rejected_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("scheduler: {lengths: oracle}\n")
    flags = ["--config", str(tmp_path / "scenario.yaml"), "--out", str(tmp_path / "shoal.yaml")]
    code, shown = plan(tmp_path, "slo.ttft=1s", *flags)
    assert code != 0
    assert "expected one of maximum" in shown


def test_a_limit_on_weights_is_planned_with_and_written(tmp_path: Path) -> None:
    out = tmp_path / "shoal.yaml"
    code, shown = plan(tmp_path, "slo.ttft=1s,pin=true", "--weights-memory", "20GiB", "--out", str(out))
    assert code == 0, shown
    assert "20.0 GiB of each device" in " ".join(shown.split())
    config = load_config(ServerOptions, file=out)
    assert config.weights.memory_bytes == 20 << 30
    assert config.services[0].pin


def test_batches_are_not_planned_with(tmp_path: Path) -> None:
    code, shown = plan(tmp_path, "slo.ttft=1s", "--preset", "scls")
    assert code != 0
    assert "batching: planning dispatches requests one by one" in shown


@pytest.mark.parametrize("text", ["TIMESTAMP,ContextTokens,GeneratedTokens\n", ""])
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "devices.yaml").write_text(CATALOGUE)
    (tmp_path / "trace.csv").write_text(text)
    service = ["--service", "chat=llama-3.1-8b,slo.ttft=1s"]
    arguments = ["plan", "--devices", str(tmp_path / "devices.yaml"), *service]
    done = runner.invoke(app, [*arguments, "--trace", str(tmp_path / "trace.csv")])
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError | SystemExit), done.exception


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("{name: l40s, price: 1, span: 2}", "span several devices"),
        ("{name: own, price: 1, memory: 40GiB, latency: {roofline: {device: a100-40}}}", "write engine: cpu"),
    ],
)
def test_unservable_kinds_are_rejected_before_the_search(tmp_path: Path, kind: str, says: str) -> None:
    (tmp_path / "devices.yaml").write_text(f"devices: [{kind}]\n")
    arguments = [
        "plan",
        "--devices",
        str(tmp_path / "devices.yaml"),
        "--service",
        "chat=llama-3.1-8b,slo.ttft=1s",
    ]
    done = runner.invoke(app, [*arguments, *WORKLOAD, "--out", str(tmp_path / "shoal.yaml")])
    assert done.exit_code != 0
    assert says in str(done.exception)


def test_an_unconfirmed_plan_has_a_remark(tmp_path: Path) -> None:
    demand = build_demand(
        load_scenario(file=_scenario(tmp_path)),
        load_catalogue(tmp_path / "devices.yaml"),
        parse_goals("ttft=1s"),
    )
    found = search(demand, PlanningOptions(attainment=0.9, trials=1, processes=1))
    assert found.chosen is not None
    assert found.confirmed
    assert "Not confirmed" not in " ".join(remarks(demand, found))
    missed = replace(found.chosen, attainment=Interval(0.8, 0.7, 0.9))
    kept = replace(found.chosen, attainment=Interval(0.95, 0.9, 1.0))
    said = remarks(demand, replace(found, chosen=missed, one_less=[kept]))
    assert said[0].startswith("Not confirmed: 80.0% of the later requests met their goals (70.0% to 90.0%)")
    assert "kept the goals of later requests too (95.0%)" in said[1]


def test_an_unconfirmed_plan_has_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unconfirmed(*arguments: object) -> Plan:
        found = search(*arguments)  # type: ignore[arg-type]
        assert found.chosen is not None
        return replace(found, chosen=replace(found.chosen, attainment=Interval(0.8, 0.7, 0.9)))

    monkeypatch.setattr("shoal.plan.capacity.plan", unconfirmed)
    out = tmp_path / "shoal.yaml"
    code, shown = plan(tmp_path, "slo.ttft=1s", "--out", str(out))
    assert code == 3
    assert "Not confirmed: 80.0%" in shown
    assert out.read_text().startswith("# Not confirmed")


def _scenario(folder: Path) -> Path:
    (folder / "devices.yaml").write_text(CATALOGUE)
    workload = "workload: {lengths: {prompt: 10, output: 10}, rate: 1, requests: 60}\n"
    (folder / "scenario.yaml").write_text(f"services: [{{name: chat, model: llama-3.1-8b}}]\n{workload}")
    return folder / "scenario.yaml"


def test_one_model_in_two_dtypes_is_in_memory_twice(tmp_path: Path) -> None:
    (tmp_path / "devices.yaml").write_text("devices: [{name: l40s, price: 1, most: 2}]\n")
    services = (
        "{name: a, model: llama-3.1-8b, dtype: float16}, {name: b, model: llama-3.1-8b, dtype: float32}"
    )
    workload = "workload: {lengths: {prompt: 10, output: 10}, rate: 1, requests: 60}\n"
    (tmp_path / "scenario.yaml").write_text(f"services: [{services}]\n{workload}")
    scenario = load_scenario(file=tmp_path / "scenario.yaml")
    demand = build_demand(scenario, load_catalogue(tmp_path / "devices.yaml"), parse_goals("ttft=1s"))
    memory = demand.engines.memory
    apart = [memory.left_bytes([name], 0, 1) for name in ("a", "b")]
    assert apart[1] == 2 * apart[0]
    assert memory.left_bytes(["a", "b"], 0, 1) == sum(apart)


def test_goals_that_no_fleet_meets_are_an_error(tmp_path: Path) -> None:
    code, shown = plan(tmp_path, "slo.tpot=1ms", "--html", str(tmp_path / "plan.html"))
    assert code != 0
    assert "nothing in the catalogue is enough" in shown
    page = (tmp_path / "plan.html").read_text()
    assert 'class="verdict bad"' in page
    assert "Nothing in the catalogue is enough: " in page


def test_a_kind_without_a_data_sheet_needs_memory_and_times(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("devices: [{name: own, price: 1}]\n")
    arguments = ["plan", "--devices", str(tmp_path / "own.yaml"), "--service", "chat=llama-3.1-8b", *WORKLOAD]
    done = runner.invoke(app, arguments)
    assert done.exit_code != 0
    assert "write memory and latency" in done.output + str(done.exception)


@pytest.mark.parametrize(
    ("flag", "text", "most"),
    [
        ("attainment", "0%", "at most"),
        ("attainment", "95", "at most"),
        ("search-share", "100%", "below"),
        ("search-share", "-1", "below"),
    ],
)
def test_invalid_shares_are_rejected_with_the_flag(tmp_path: Path, flag: str, text: str, most: str) -> None:
    code, shown = plan(tmp_path, "slo.ttft=1s", f"--{flag}", text)
    assert code != 0
    assert f"--{flag}: write a share above 0% and {most} 100%, such as 60% or 0.6; got {text}" in shown


def interrupt(folder: Path, arguments: list[str], until: str) -> tuple[str, str]:
    """Ctrl-C at the line of a command's standard error that has ``until``; returns that and the output.

    A terminal interrupts all processes of a command, those that simulate too.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        while until not in (line := process.stderr.readline()):
            assert line, f"it ended before it told of {until!r}"
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in output + errors
    assert "SpawnProcess" not in errors
    return line, output


def test_ctrl_c_shows_and_writes_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "devices.yaml").write_text(CATALOGUE.replace("most: 2", "most: 4"))
    goals = ["--service", "chat=llama-3.1-8b,slo.ttft=1s,slo.tpot=60ms"]
    workload = ["--workload", "sharegpt", "--rate", "30", "--requests", "400", "--json", "plan.json"]
    line, output = interrupt(
        tmp_path, ["plan", "--devices", "devices.yaml", *goals, *workload], "of the goals met"
    )
    assert "Stopped before a plan was chosen" in output
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["stopped"] is True
    assert told["chosen"] is None
    assert told["fleets"][0]["devices"] == {"a100-80": 4}
    assert line.startswith("4 a100-80, ")
    assert f"{told['fleets'][0]['slo_attainment']:.1%} of the goals met" in line


@pytest.mark.slow
def test_ctrl_c_shows_and_writes_the_rounds_of_a_search(tmp_path: Path) -> None:
    scenario = ["--model", "llama-3.1-8b", "--device", "a100-80", "--workload", "azure-code", "--rate", "8"]
    search = ["--requests", "4000", "--trials", "4", "--json", "tuned.json", "--out", "scheduler.yaml"]
    _, output = interrupt(tmp_path, ["tune", *scenario, *search], "schedulers on 600 requests")
    assert "Stopped before the best was compared" in output
    told = json.loads((tmp_path / "tuned.json").read_text())
    assert told["stopped"] is True
    assert told["best"] is None
    assert [len(each["schedulers"]) for each in told["rounds"]] == [4]
    assert told["rounds"][0]["losses"] == sorted(told["rounds"][0]["losses"])
    assert not (tmp_path / "scheduler.yaml").exists()
