"""``shoal simulate`` from a scenario to its files."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.cli.simulate_view import SimulationProgress
from shoal.core import ConfigError
from shoal.measure import EngineTotals, RunRecord, summarise
from shoal.measure.tables import engines_grid

runner = CliRunner()

SCENARIO = """\
latency: {roofline: {model: llama-3.1-8b, device: a100-80}}
kv_cache: {blocks: 60}
scheduler: {preset: vllm, starvation: never}
services: [{name: chat, slo: {ttft: 1s}}]
workload: {lengths: {prompt: {distribution: uniform, low: 10, high: 300}, output: 40}, rate: 30, requests: 60}
"""
FILES = {"summary.json", "requests.jsonl", "requests.csv", "samples.csv", "report.html", "trace.json"}


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


def simulate(*arguments):
    result = runner.invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_scenario_gives_tables_and_files(scenario, tmp_path):
    output = simulate("--config", scenario, "--out", tmp_path / "out")
    assert "preset vllm, starvation never" in output
    assert "60/60" in output
    assert "times real time" in output
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    report = (tmp_path / "out" / "report.html").read_text()
    assert "<title>llama-3.1-8b on 1 a100-80, 30 requests/s</title>" in report
    [sentence] = re.findall(r'class="verdict[^>]*>.*?<span>(.*?)</span>', report)
    assert sentence.startswith(("Served late: ", "Saturated: limited by KV memory; "))
    assert sentence in " ".join(output.split())
    lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    assert [row["output_tokens"] for row in requests] == [40] * 60
    assert all(row["slo_ttft_s"] == 1 for row in requests)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["title"] == "tiny"
    assert summary["facts"]["workload"].endswith("60 requests, seed 0")
    assert summary["overall"]["answered"] == 60
    assert summary["overall"]["preemptions"] > 0
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "step" for event in events)


def test_the_same_scenario_gives_the_same_bytes(scenario, tmp_path):
    folders = [tmp_path / name for name in ("first", "again", "every step")]
    for folder, more in zip(folders, ([], [], ["--no-skip-ahead"]), strict=True):
        simulate("--config", scenario, "--out", folder, *more)
    first, again, every_step = map(contents, folders)
    assert first == again
    assert first == every_step


def test_another_seed_gives_other_bytes(scenario, tmp_path):
    for seed in ("0", "1"):
        simulate("--config", scenario, "--seed", seed, "--json", tmp_path / f"{seed}.json")
    first, second = (json.loads((tmp_path / f"{seed}.json").read_text()) for seed in ("0", "1"))
    assert first["overall"]["prompt_tokens"] != second["overall"]["prompt_tokens"]


def test_single_files_are_written(scenario, tmp_path):
    wanted = [tmp_path / name for name in ("page.html", "steps.json", "figures.json")]
    flags = zip(("--html", "--chrome-trace", "--json"), wanted, strict=True)
    output = simulate("--config", scenario, *(part for pair in flags for part in pair))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in wanted} | {"tiny.yaml"}
    assert "wrote " in output
    assert wanted[0].read_text().startswith("<!")
    assert '"cat":"step"' in wanted[1].read_text()


def test_the_summary_is_the_only_standard_output(scenario):
    result = runner.invoke(app, ["simulate", "--config", str(scenario), "--json", "-"])
    assert json.loads(result.stdout)["title"] == "tiny"
    assert "times real time" in result.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--out", "file"), "cannot write into file: "),
        (("--out", "file/in/it"), "cannot write into file/in/it: "),
        (
            ("--compare", "file", "--compare-plot", "picture.xyz"),
            "a picture's name ends with .png, .svg, .pdf",
        ),
    ],
)
def test_unwritable_outputs_are_reported_before_the_run(scenario, flags, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["simulate", "--config", str(scenario), *flags])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert "simulating" not in result.output


@pytest.mark.slow
def test_files_are_written_if_standard_output_is_closed(scenario, tmp_path):
    """As with ``| head``."""
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    command = [sys.executable, "-m", "shoal.cli", "simulate", "--config", str(scenario)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*command, "--out", str(out), "--json", str(summary)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert "Traceback" not in done.stderr
    assert json.loads(summary.read_text())["title"] == "tiny"
    assert (out / "requests.jsonl").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk_is_one_line(scenario):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "shoal.cli", "simulate", "--config", str(scenario)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: cannot write all output: No space left on device"
    assert "Traceback" not in done.stderr


def test_flags_alone_are_enough(tmp_path):
    flags = "--model llama-3.1-8b --device h100 --workload sharegpt --rate 4 --requests 30 --engines 2"
    output = simulate(*flags.split())
    assert "2, round-robin" in output
    assert "30/30" in output
    assert "Engines" in output


def test_flags_override_the_file(scenario, tmp_path):
    output = simulate("--config", scenario, "--requests", "7", "--preset", "orca")
    assert "7/7" in output
    assert "preset orca" in output


def test_an_empty_trace_is_no_error(scenario, tmp_path):
    (tmp_path / "empty.csv").write_text("")
    output = simulate("--config", scenario, "--trace", tmp_path / "empty.csv", "--out", tmp_path / "out")
    assert "has no requests" in output
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


def test_an_answer_of_a_billion_tokens_ends_with_the_pool(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s\n100,50,0\n100,1000000000,1\n100,0,2\n")
    flags = ["--model", "llama-3.1-8b", "--device", "h100", "--kv-tokens", "1600", "--preset", "vllm"]
    output = " ".join(simulate("--trace", trace, *flags).split())
    assert "mean request of 100 + 775 tokens" in output
    assert "1 request skipped" in output
    assert "2/2" in output


def test_the_engines_table_fits_80_columns():
    engine = EngineTotals(
        steps=999_999,
        decode_steps=999_999,
        busy_ns=10**9,
        kv_used_mean=0.999,
        kv_used_peak=0.999,
        preemptions=99_999,
        recomputed_tokens=9_999_999,
        swapped_tokens=0,
        prefill_tokens=123_456_789,
        cached_tokens=0,
        output_tokens=9_999_999,
    )
    run = RunRecord(title="", requests=[], samples=[], engines=[engine, engine], end_ns=10**9)
    console = Console(width=80, file=io.StringIO())
    console.print(engines_grid(summarise(run)).to_rich())
    lines = console.file.getvalue().splitlines()
    cells = "999,999 100.0% 9,999,999 123.5M 99.9% 99.9% 99,999 9,999,999"
    assert [" ".join(line.split()) for line in lines if "," in line] == [f"0 {cells}", f"1 {cells}"]
    assert lines[2].split()[0] == "engine"
    assert lines[2].split()[-1] == "again"


def test_requests_beyond_the_pool_are_refused_and_counted(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s\n10,5,0\n5000,5,1\n20,1,0\n")
    flags = ["--model", "llama-3.1-8b", "--device", "h100", "--kv-tokens", "1600"]
    output = simulate("--trace", trace, *flags, "--json", tmp_path / "figures.json")
    assert "default refused 1; the first, r2: the prompt has 5000" in " ".join(output.split())
    overall = json.loads((tmp_path / "figures.json").read_text())["overall"]
    assert (overall["requests"], overall["answered"], overall["refused"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "workload: missing; say what arrives"),
        (["--model", "lama"], "--model: latency.roofline.model: model 'lama' has no shape on record"),
        (["--config", "none.yaml"], "cannot read the configuration file none.yaml"),
        (
            ["--config", "tiny.yaml", "--trace", "none.csv"],
            "--trace: workload.trace: there is no file or folder",
        ),
        (["--config", "tiny.yaml", "--trace", "broken.csv"], "broken.csv:3: output_tokens is 'x'; expected"),
        (["--config", "tiny.yaml", "--trace", "tiny.yaml"], "tiny.yaml: the format is not known"),
        (["--config", "tiny.yaml", "--preset", "vlm"], "--preset: scheduler.preset: expected one of"),
        (["--config", "tiny.yaml", "--requests", "0"], "--requests: workload.requests: must be at least 1"),
        (["--config", "tiny.yaml", "--requests", "many"], "expected a whole number, got 'many'"),
        (["--config", "tiny.yaml", "--json", "none/figures.json"], "there is no folder none"),
        (["--config", "tiny.yaml", "--html", "none/page.html"], "there is no folder none"),
        (["--config", "tiny.yaml", "--out", "tiny.yaml"], "cannot write into tiny.yaml"),
        (["--config", "tiny.yaml", "--tp", "3"], "(`shoal simulate --tp`): llama-3.1-8b has 32 heads"),
        (["--config", "tiny.yaml", "--kv-memory", "1KiB"], "(flag --kv-memory): kv_cache memory of 1024"),
        (["--config", "tiny.yaml", "--device", "a100"], "did you mean 'a100-40' or 'a100-80'?"),
        (["--config", "tiny.yaml", "--device", "h1000"], "--device: latency.roofline.device: device 'h1000'"),
    ],
)
def test_mistakes_are_one_line(scenario, tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.csv").write_text("prompt_tokens,output_tokens,arrival_s\n1,1,0\n1,x,0\n")
    assert run(["simulate", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_model_without_a_device_is_reported_by_flags(capsys):
    assert run(["simulate", "--model", "llama-3.1-8b", "--workload", "sharegpt", "--requests", "9"]) == 2
    assert "--model needs a device" in capsys.readouterr().err


def test_help_has_examples_and_panels():
    output = " ".join(simulate("--help").split())
    assert "shoal simulate --model llama-3.1-8b --device a100-80" in output
    assert "--no-skip-ahead" in output


def test_ctrl_c_ends_a_simulation_quietly(tmp_path):
    flags = ["--model", "llama-3.1-8b", "--device", "h100", "--workload", "reasoning", "--rate", "4"]
    command = [sys.executable, "-m", "shoal.cli", "simulate", *flags, "--requests", "50000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline() == "simulating 50,000 requests\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in output + errors
    assert process.returncode == 130


def test_ctrl_c_ends_a_run_with_the_figures_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(progress: SimulationProgress, finished: int) -> None:
        if not progress.stopped():
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SimulationProgress, "update", interrupt)
    before = signal.getsignal(signal.SIGINT)
    flags = ["--model", "llama-3.1-8b", "--device", "a100-80", "--workload", "sharegpt", "--rate", "5"]
    code = run(["simulate", *flags, "--requests", "5000", "--out", str(tmp_path / "out")])
    assert code == 130
    assert signal.getsignal(signal.SIGINT) == before
    shown = " ".join(capsys.readouterr().out.split())
    rows = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    assert 100 <= len(rows) < 200
    assert f"after {len(rows)} of 5,000 requests; all figures are of these" in shown
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["overall"]["requests"] == len(rows)


def test_results_are_the_only_standard_output_without_standard_error(scenario):
    command = [sys.executable, "-m", "shoal.cli", "simulate", "--config", str(scenario), "--json", "-"]
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    result = subprocess.run(closed, stdout=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 0
    assert json.loads(result.stdout)
