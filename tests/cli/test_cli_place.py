"""``shoal place``: its placement is the best of all possible ones, and can be served."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.settings import load_config
from shoal.serve.options import ServerOptions
from small_searches import small_searches

runner = CliRunner()
DEVICES = ["a100-80-0", "l40s-0"]
SERVICES = {"chat": "llama-3.1-8b", "big": "qwen2.5-14b"}


LONG = (8_000, 10)
"""A request for which either service needs more memory than both leave on the smaller device."""


def place(folder: Path, *flags: str, devices: str = "{name: a100-80, most: 1}, {name: l40s, most: 1}") -> Any:
    """Where two services share two devices that are busy with short answers."""
    (folder / "devices.yaml").write_text(f"devices: [{devices}]\n")
    lengths = [LONG, *((100 + 41 * number % 500, 5 + 7 * number % 30) for number in range(119))]
    rows = [f"{prompt},{output},{number / 40}" for number, (prompt, output) in enumerate(lengths)]
    (folder / "trace.csv").write_text("\n".join(["prompt_tokens,output_tokens,arrival_s", *rows]))
    services = [word for name, model in SERVICES.items() for word in ("--service", f"{name}={model}")]
    goals = ["--slo", "ttft=1s,tpot=80ms", "--trace", str(folder / "trace.csv")]
    return runner.invoke(app, ["place", "--devices", str(folder / "devices.yaml"), *services, *goals, *flags])


def write_server(file: Path, placement: dict[str, list[str]], **sections: Any) -> str:
    """A server's file with that placement, as written by hand."""
    used = [name for name in DEVICES if any(name in chosen for chosen in placement.values())]
    settings = {
        "devices": [{"device": f"cuda:{at}", "name": name} for at, name in enumerate(used)],
        "placement": placement,
        "services": [{"name": name, "model": model} for name, model in SERVICES.items()],
    }
    file.write_text(yaml.safe_dump(settings | sections))
    return str(file)


class Compared(NamedTuple):
    """A search, compared with every placement of two services on two devices that has room."""

    told: dict[str, Any]
    """Its figures."""
    out: Path
    """What it wrote for a server."""
    files: list[str]
    """The placements, by hand."""
    refused: list[str]
    """Those that have no room."""


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_searches():
        yield


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    choices = [["a100-80-0"], ["l40s-0"], DEVICES]
    files, refused = [], []
    for number, (chat, big) in enumerate(product(choices, choices)):
        file = write_server(folder / f"{number}.yaml", {"chat": chat, "big": big})
        (refused if "l40s-0" in chat and "l40s-0" in big else files).append(file)
    compare = [word for file in files for word in ("--compare", file)]
    out, found = folder / "shoal.yaml", folder / "placed.json"
    done = place(folder, "--out", str(out), "--json", str(found), *compare)
    assert done.exit_code == 0, done.output
    assert "Not compared with all on each: there is no room" in " ".join(done.output.split())
    return Compared(json.loads(found.read_text()), out, files, refused)


def test_the_placement_is_optimal_and_a_server_reads_it(compared: Compared, tmp_path: Path) -> None:
    """Brute force, by the same held-out requests."""
    best, *others = compared.told["placements"]
    assert [each["name"] for each in others] == ["each apart", *compared.files]
    attained = [each["slo_attainment"][0] for each in others]
    assert best["slo_attainment"][0] >= max(attained) - 0.01
    assert min(attained) < best["slo_attainment"][0] - 0.05, "all are alike here"
    config = load_config(ServerOptions, file=compared.out)
    written = {
        engine.name: {service.name for service in engine.options.services} for engine in config.engine_plans()
    }
    assert written == {group["devices"][0]: set(group["services"]) for group in best["placement"]}
    assert sorted([*written, *compared.told["idle"]]) == DEVICES
    for file in compared.refused:
        done = place(tmp_path, "--compare", file)
        assert done.exit_code != 0
        assert "l40s-0 has no memory for" in done.output + str(done.exception)


def test_the_written_placement_is_simulated_with_the_same_figures(compared: Compared, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert place(tmp_path, "--compare", str(compared.out), "--json", str(again)).exit_code == 0
    *_, read = json.loads(again.read_text())["placements"]
    assert read == compared.told["placements"][0] | {"name": str(compared.out)}


@pytest.mark.slow
def test_a_compared_file_keeps_its_scheduler_and_dispatch(tmp_path: Path) -> None:
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


def test_a_file_with_another_limit_on_weights_is_refused(tmp_path: Path) -> None:
    both = {name: ["a100-80-0"] for name in SERVICES}
    other = write_server(tmp_path / "other.yaml", both, weights={"memory": "30GiB"})
    done = place(tmp_path, "--compare", other)
    assert done.exit_code != 0
    assert "engine a100-80-0 has 30.0 GiB for weights, the scenario no limit" in str(done.exception)


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
