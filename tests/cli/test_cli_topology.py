"""``shoal topology``: its tables and files, and maps of a model."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal.place.topology
from shoal.cli.app import app, run
from shoal.config.topology import read_topology
from shoal.place.topology import Topology, detect

runner = CliRunner()
TWO = """\
devices:
  - {name: big, kind: rtx-3090, host: h, memory: 24GiB}
  - {name: small, kind: v100, host: h, memory: 9GiB}
links:
  host: {bandwidth: 10GB, latency: 20us}
  network: {bandwidth: 1GB, latency: 50us}
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO)
    return path


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(shoal.place.topology, "load_nvml", lambda: None)
    monkeypatch.setattr(shoal.place.topology, "has_nvidia_driver", lambda: False)


def test_this_machine_is_shown_and_written(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["topology", "--host", "here"])
    assert shown.exit_code == 0
    assert "here-cpu0" in shown.stdout
    assert "shoal topology -o cluster.yaml" in shown.stdout
    written = runner.invoke(app, ["topology", "--host", "here", "-o", str(tmp_path / "c.yaml")])
    assert written.exit_code == 0
    found: Topology = read_topology(tmp_path / "c.yaml")
    assert found.cluster.devices == tuple(detect(None, "here").cluster.devices)
    piped = runner.invoke(app, ["topology", "--host", "here", "-o", "-"])
    assert piped.stdout == (tmp_path / "c.yaml").read_text()


def test_a_driver_without_its_module_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.place.topology, "has_nvidia_driver", lambda: True)
    assert "pip install nvidia-ml-py" in runner.invoke(app, ["topology"]).stderr


def test_a_file_is_shown(two: Path) -> None:
    shown = runner.invoke(app, ["topology", str(two)])
    assert shown.exit_code == 0
    for text in ("big", "24.0 GiB", "small", "9.0 GiB", "10.00 GB/s", "20 us"):
        assert text in shown.stdout


def test_unknown_kinds_are_shown(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two.write_text(TWO.replace("v100", "mine"))
    shown = runner.invoke(app, ["topology", str(two)])
    assert shown.exit_code == 0
    assert "unknown" in shown.stdout
    assert run(["topology", str(two), "--map", "qwen2.5-7b"]) == 2
    assert "speeds: {mine: 900GB}" in " ".join(capsys.readouterr().err.split())


def test_a_model_is_mapped(two: Path) -> None:
    mapped = runner.invoke(app, ["topology", str(two), "--map", "qwen2.5-7b"])
    assert mapped.exit_code == 0
    rows = {line.split()[0]: line for line in mapped.stdout.splitlines() if line.strip()}
    assert "28 layers of 14.18 GiB" in mapped.stdout
    for name in ("helr", "he", "lr", "cost", "greedy"):
        assert "big: 0-27" in rows[name]
    assert "exact" in rows["helr"]


def test_a_model_too_large_for_one_device_is_divided(two: Path) -> None:
    mapped = runner.invoke(app, ["topology", str(two), "--map", "qwen2.5-14b", "--reserve", "512MiB"])
    assert mapped.exit_code == 0
    helr = next(line for line in mapped.stdout.splitlines() if line.startswith(" helr"))
    assert "big: " in helr
    assert "small: " in helr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--reserve", "1GiB"], "--reserve is for --map"),
        (["{two}", "--host", "x"], "--host names this machine"),
        (["{two}", "--map", "nothing-9b"], "nothing-9b"),
        (["{two}", "--map", "qwen2.5-7b", "--reserve", "much"], "--reserve: expected a size"),
        (["{two}", "--map", "llama-2-70b"], "80 layers of 128.48 GiB do not fit"),
        (["{two}x"], "cannot read"),
        (["-o", "/nowhere/c.yaml"], "there is no folder"),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], says: str, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["topology", *(argument.format(two=two) for argument in arguments)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
