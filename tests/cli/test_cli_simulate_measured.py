"""``shoal simulate`` compared with a measured run, here one that was simulated with an overhead."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.config.scenario_measured import is_part

runner = CliRunner()

SCENARIO = """\
latency: {roofline: {model: llama-3.1-8b, device: a100-80%s}}
kv_cache: {blocks: 2000}
scheduler: {preset: vllm, starvation: never, max_batched_tokens: 256}
"""
WORKLOAD = (
    "workload: {lengths: {prompt: {distribution: uniform, low: 10, high: 300}, output: 40}, rate: 30, "
    "requests: 60}\n"
)


def simulate(*arguments: object) -> str:
    result = runner.invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario without overhead (plain.yaml), and the log of a run with one (run/requests.jsonl)."""
    path = tmp_path_factory.mktemp("measured")
    slow = SCENARIO % ", overhead: {step: 1ms, layer: 50us}"
    (path / "slow.yaml").write_text(slow + WORKLOAD)
    (path / "same.yaml").write_text(slow)
    (path / "plain.yaml").write_text(SCENARIO % "")
    simulate("--config", path / "slow.yaml", "--out", path / "run")
    return path


def test_a_run_is_equal_to_itself(folder: Path, tmp_path: Path) -> None:
    log = folder / "run" / "requests.jsonl"
    output = simulate("--config", folder / "same.yaml", "--compare", log, "--out", tmp_path / "out")
    assert "Measured and simulated, 60 requests" in output
    assert output.count("+0.0%") == 9
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert all(row["difference"] == 0 for row in written["figures"])
    means = [row["band"] for row in written["figures"] if row["figure"] == "mean"]
    assert all(-0.1 < faster < -0.01 < 0.01 < slower < 0.1 for faster, slower in means)
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    simulate("--config", folder / "slow.yaml", "--out", tmp_path / "out")
    assert not list((tmp_path / "out").glob("comparison.*"))


def test_the_log_replaces_the_workload_of_the_file(folder: Path) -> None:
    log = folder / "run" / "requests.jsonl"
    flags = ["--config", folder / "slow.yaml", "--compare", log]
    assert "Measured and simulated, 60 requests" in simulate(*flags)


@pytest.mark.slow
def test_requests_of_a_log_keep_their_services(folder: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.yaml"
    services = "services: [{name: a}, {name: b}]\n"
    shares = WORKLOAD.replace("}\n", ", services: {a: 3, b: 1}, seed: 1}\n")
    two.write_text((folder / "same.yaml").read_text() + services + shares)
    simulate("--config", two, "--out", tmp_path / "run")
    log = tmp_path / "run" / "requests.jsonl"
    output = simulate("--config", two, "--seed", "2", "--compare", log, "--out", tmp_path / "again")
    assert output.count("+0.0%") == 9
    again = (tmp_path / "again" / "requests.jsonl").read_text()
    service_of = {each["request_id"]: each["service"] for each in map(json.loads, again.splitlines())}
    assert {
        each["request_id"]: each["service"] for each in map(json.loads, log.read_text().splitlines())
    } == (service_of)


def test_an_overhead_is_fitted_and_used(folder: Path, tmp_path: Path) -> None:
    log, picture = folder / "run" / "requests.jsonl", tmp_path / "both.svg"
    output = simulate(
        "--config",
        folder / "plain.yaml",
        "--fit-overhead",
        log,
        "--fit-requests",
        50,
        "--compare-plot",
        picture,
    )
    found = re.search(r"overhead: {step: ([\d.]+)us, layer: ([\d.]+)us}", output)
    assert found is not None
    assert float(found[1]) == pytest.approx(1000, abs=100)
    assert float(found[2]) == pytest.approx(50, abs=8)
    assert "<svg" in picture.read_text()
    differences = [float(value) for value in re.findall(r"s +([+-][\d.]+)% +[+-]", output)]
    assert len(differences) == 9
    assert max(map(abs, differences)) < 2


def test_overhead_fitted_to_one_log_is_compared_with_another(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "run" / "requests.jsonl").read_text().splitlines()
    (tmp_path / "half.jsonl").write_text("\n".join(lines[:30]))
    flags = ["--fit-overhead", folder / "run" / "requests.jsonl", "--compare", tmp_path / "half.jsonl"]
    output = simulate("--config", folder / "plain.yaml", *flags)
    assert "fitted to 120 times" in output
    assert "Measured and simulated, 30 requests" in output


def test_a_part_of_a_run_is_fitted_while_all_is_simulated(folder: Path, tmp_path: Path) -> None:
    """Alone it would be simulated faster than it was, and the rest be taken for overhead."""
    log = folder / "run" / "requests.jsonl"
    lines = sorted(log.read_text().splitlines(), key=lambda line: json.loads(line)["arrival_s"])
    part, other = tmp_path / "part.jsonl", tmp_path / "other.jsonl"
    part.write_text("\n".join(lines[:30]))
    other.write_text("\n".join(lines[10:50]))
    found = []
    for fitted, compared in ((part, log), (part, part)):
        flags = ["--fit-overhead", fitted, "--compare", compared]
        output = simulate("--config", folder / "plain.yaml", *flags)
        found.append(float(re.search(r"overhead: {step: ([\d.]+)us", output)[1]))  # type: ignore[index]
    assert found[0] == pytest.approx(1000, abs=150)
    assert found[1] > 1300
    assert is_part(part, log)
    assert not is_part(log, part)
    assert not is_part(other, log)  # its first request is another, so its times are too


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fit-requests", "5"], "--fit-requests goes with --fit-overhead LOG"),
        (["--compare-plot", "both.png"], "--compare-plot goes with --compare LOG"),
        (["--compare", "none.jsonl"], "--compare: workload.trace: there is no file or folder none.jsonl"),
        (
            ["--compare", "log.jsonl", "--rate", "5"],
            "--compare takes its requests, all of them, from log.jsonl; leave out --rate",
        ),
        (
            ["--fit-overhead", "log.jsonl", "--requests", "5"],
            "--fit-overhead takes its requests, all of them, from log.jsonl; leave out --requests",
        ),
        (["--compare", "untimed.jsonl"], "untimed.jsonl:1: no 'first_token_ts'"),
        (["--compare", "log.jsonl", "--compare-plot", "none/both.png"], "there is no folder none"),
        (["--fit-overhead", "log.jsonl", "--config", "two.yaml"], "a scenario of one service"),
        (["--fit-overhead", "log.jsonl", "--config", "fit.yaml"], "latency.fit holds what the host adds"),
        (["--compare", "log.jsonl", "--config", "clients.yaml"], "leave out workload.clients"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_bytes((folder / "run" / "requests.jsonl").read_bytes())
    (tmp_path / "untimed.jsonl").write_text('{"input_toks": 5, "output_toks": 5, "arrival_time": 1}\n')
    (tmp_path / "plain.yaml").write_text(SCENARIO % "")
    (tmp_path / "two.yaml").write_text(SCENARIO % "" + "services: [llama-3.1-8b, qwen3-8b]\n")
    (tmp_path / "fit.yaml").write_text("latency: {fit: plain.yaml}\nservices: [llama-3.1-8b]\n")
    (tmp_path / "clients.yaml").write_text(SCENARIO % "" + "workload: {clients: 4}\n")
    config = [] if "--config" in arguments else ["--config", "plain.yaml"]
    assert run(["simulate", *arguments, *config]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
