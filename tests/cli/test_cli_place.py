"""``shoal place``: what it finds is the best of what can be written by hand, and can be served."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.settings import load_config
from shoal.serve.options import ServerOptions

runner = CliRunner()
DEVICES = ["a100-80-0", "l40s-0"]
SERVICES = {"chat": "llama-3.1-8b", "big": "qwen2.5-14b"}


def place(folder: Path, *flags: str, devices: str = "{name: a100-80, most: 1}, {name: l40s, most: 1}") -> Any:
    (folder / "devices.yaml").write_text(f"devices: [{devices}]\n")
    services = [word for name, model in SERVICES.items() for word in ("--service", f"{name}={model}")]
    goals = ["--slo", "ttft=1s,tpot=80ms", "--workload", "sharegpt", "--rate", "14", "--requests", "600"]
    return runner.invoke(app, ["place", "--devices", str(folder / "devices.yaml"), *services, *goals, *flags])


def write_server(file: Path, placement: dict[str, list[str]], **sections: Any) -> str:
    """A server's file with that placement, as somebody would write it."""
    used = [name for name in DEVICES if any(name in chosen for chosen in placement.values())]
    settings = {
        "devices": [{"device": f"cuda:{at}", "name": name} for at, name in enumerate(used)],
        "placement": placement,
        "services": [{"name": name, "model": model} for name, model in SERVICES.items()],
    }
    file.write_text(yaml.safe_dump(settings | sections))
    return str(file)


def test_no_placement_that_fits_is_better_and_a_server_reads_what_is_written(tmp_path: Path) -> None:
    """Brute force: every placement of two services on two devices, by the same held-out requests."""
    choices = [["a100-80-0"], ["l40s-0"], DEVICES]
    files, refused = [], []
    for number, (chat, big) in enumerate(product(choices, choices)):
        file = write_server(tmp_path / f"{number}.yaml", {"chat": chat, "big": big})
        (refused if "l40s-0" in chat and "l40s-0" in big else files).append(file)
    compare = [word for file in files for word in ("--compare", file)]
    out, found = tmp_path / "shoal.yaml", tmp_path / "placed.json"
    done = place(tmp_path, "--out", str(out), "--json", str(found), *compare)
    assert done.exit_code == 0, done.output
    told = json.loads(found.read_text())
    best, *others = told["placements"]
    assert [each["name"] for each in others] == ["each apart", *files]
    assert "Not compared with all on each: there is no room" in " ".join(done.output.split())
    assert best["slo_attainment"][0] >= max(each["slo_attainment"][0] for each in others) - 0.01
    config = load_config(ServerOptions, file=out)
    written = {
        engine.name: {service.name for service in engine.options.services} for engine in config.engine_plans()
    }
    assert written == {group["devices"][0]: set(group["services"]) for group in best["placement"]}
    assert sorted([*written, *told["idle"]]) == DEVICES
    for file in refused:
        done = place(tmp_path, "--compare", file)
        assert done.exit_code != 0
        assert "l40s-0 has no memory for" in done.output + str(done.exception)


def test_what_it_writes_can_be_simulated_again_with_the_same_figures(tmp_path: Path) -> None:
    out, first, again = (tmp_path / name for name in ("shoal.yaml", "first.json", "again.json"))
    assert place(tmp_path, "--out", str(out), "--json", str(first)).exit_code == 0
    assert place(tmp_path, "--compare", str(out), "--json", str(again)).exit_code == 0
    found, *_ = json.loads(first.read_text())["placements"]
    *_, read = json.loads(again.read_text())["placements"]
    assert read == found | {"name": str(out)}


def test_a_file_brings_its_own_scheduler_and_dispatch(tmp_path: Path) -> None:
    placement = {"chat": ["a100-80-0"], "big": ["a100-80-0"]}
    slow = write_server(
        tmp_path / "slow.yaml",
        placement,
        scheduler={"max_running": 1},
        cluster={"dispatch": "least-requests"},
    )
    fast = write_server(tmp_path / "fast.yaml", placement)
    found = tmp_path / "placed.json"
    assert place(tmp_path, "--compare", slow, "--compare", fast, "--json", str(found)).exit_code == 0
    *_, first, second = json.loads(found.read_text())["placements"]
    assert (first["dispatch"], second["dispatch"]) == ("least-requests", "max-min")
    assert first["slo_attainment"][0] < second["slo_attainment"][0]


@pytest.mark.parametrize(
    ("placement", "services", "why"),
    [
        ({"chat": ["gpu"], "big": ["gpu"]}, SERVICES, "there is no device 'gpu'"),
        ({"chat": ["a100-80-0"]}, {"chat": "llama-3.1-8b"}, "has services chat, the scenario big, chat"),
    ],
)
def test_files_of_other_devices_or_services_are_refused(
    tmp_path: Path, placement: dict[str, list[str]], services: dict[str, str], why: str
) -> None:
    names = sorted({name for chosen in placement.values() for name in chosen})
    settings = {
        "devices": [{"device": f"cuda:{at}", "name": name} for at, name in enumerate(names)],
        "placement": placement,
        "services": [{"name": name, "model": model} for name, model in services.items()],
    }
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(settings))
    done = place(tmp_path, "--compare", str(tmp_path / "other.yaml"))
    assert done.exit_code != 0
    assert why in done.output + str(done.exception)


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (1, "no kind of device has memory for service big"),
        (2, "no host has devices with memory for big"),
    ],
)
def test_devices_without_room_for_a_service_are_refused(tmp_path: Path, span: int, why: str) -> None:
    """Two of them would have room, where an engine may span two, but there is one."""
    done = place(tmp_path, devices=f"{{name: l40s, most: 1, memory: 20GiB, span: {span}}}")
    assert done.exit_code != 0
    assert why in done.output + str(done.exception)
