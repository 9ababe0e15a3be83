"""``shoal plan``: what it writes can be served, and what it cannot find it says."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.settings import load_config
from shoal.serve.options import ServerOptions

runner = CliRunner()
CATALOGUE = """\
devices:
  - {name: a100-80, price: 1.8, most: 2}
  - {name: l40s, price: 0.9, most: 2}
"""
WORKLOAD = ["--workload", "sharegpt", "--rate", "6", "--requests", "400", "--trials", "1"]


def plan(folder: Path, goals: str, *flags: str) -> tuple[int, str]:
    (folder / "devices.yaml").write_text(CATALOGUE)
    service = f"chat=llama-3.1-8b,{goals}"
    arguments = ["plan", "--devices", str(folder / "devices.yaml"), "--service", service, *WORKLOAD, *flags]
    done = runner.invoke(app, arguments)
    return done.exit_code, done.output if done.exception is None else done.output + str(done.exception)


def test_the_plan_reads_back_as_a_server_with_its_devices(tmp_path: Path) -> None:
    out, found = tmp_path / "shoal.yaml", tmp_path / "plan.json"
    code, shown = plan(tmp_path, "slo.ttft=1s", "--out", str(out), "--json", str(found))
    assert code == 0, shown
    assert "Plan: 1 l40s" in shown
    config = load_config(ServerOptions, file=out)
    assert [service.name for service in config.services] == ["chat"]
    assert len(config.devices) == 1
    assert config.services[0].slo.ttft_s == 1
    assert json.loads(found.read_text())


def test_goals_that_no_fleet_keeps_are_an_error(tmp_path: Path) -> None:
    code, shown = plan(tmp_path, "slo.tpot=1ms")
    assert code != 0
    assert "nothing in the catalogue is enough" in shown


def test_a_kind_without_a_data_sheet_needs_memory_and_times(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("devices: [{name: own, price: 1}]\n")
    arguments = ["plan", "--devices", str(tmp_path / "own.yaml"), "--service", "chat=llama-3.1-8b", *WORKLOAD]
    done = runner.invoke(app, arguments)
    assert done.exit_code != 0
    assert "write memory and latency" in done.output + str(done.exception)


@pytest.mark.parametrize("share", ["0%", "101%"])
def test_an_attainment_is_a_share(tmp_path: Path, share: str) -> None:
    code, shown = plan(tmp_path, "slo.ttft=1s", "--attainment", share)
    assert code != 0
    assert "attainment" in shown
