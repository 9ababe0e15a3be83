"""``shoal static``: its options, its output and files, its errors."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.cli.static_report import report_table
from shoal.core import FinishReason, RequestRecord, SamplingParams, Service
from shoal.frontend.offline_batch import Completion
from shoal.static.batching import STATIC_ENGINES, STATIC_PRESETS, BatchAccount
from shoal.static.serving import offline
from shoal.static.serving.engine import StaticOutcome
from shoal.static.serving.offline import StaticSetup
from shoal.static.serving.report import StaticReport

runner = CliRunner()
REPORT = StaticReport(
    requests=3,
    finished=2,
    failed=1,
    batches=4,
    mean_batch_size=1.25,
    duration_s=2.0,
    requests_per_s=1.0,
    tokens_per_s=1234.5,
    response_mean_s=0.5,
    response_p95_s=1.9,
    tokens=BatchAccount(
        pad_tokens=1007, invalid_tokens=11, useful_tokens=2469, prefilled_tokens=60, recomputed_tokens=17
    ),
    slices={1: 2, 3: 1},
    early_return_ratio=0.25,
    worker_completion_s=(1.0, 2.0),
    worker_completion_std_s=0.5,
    estimate_error=math.nan,
)


class FakeStaticShoal:
    """Stands for the real one: answers in capitals, and fails at ``bad``."""

    made: ClassVar[list] = []

    def __init__(self, service, setup):
        self.service, self.setup = service, setup
        FakeStaticShoal.made.append(self)

    def generate(self, prompts, sampling, **how):
        self.asked = (prompts, sampling, how)
        return StaticOutcome([self._answer(str(prompt)) for prompt in prompts], REPORT)

    def _answer(self, prompt):
        record = RequestRecord(
            request_id="1", service="s", arrival_ns=0, first_token_ns=10**9, finish_ns=3 * 10**9,
            prompt_tokens=3, output_tokens=2,
        )  # fmt: skip
        answer = Completion(
            service=self.service.name, choice=0, prompt_tokens=3, text=prompt.upper(), tokens=(1, 2),
            finish_reason=FinishReason.STOP, record=record,
        )  # fmt: skip
        if prompt == "bad":
            return replace(answer, finish_reason=FinishReason.ERROR, error="worker 0 failed", record=None)
        return answer


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(offline, "StaticShoal", FakeStaticShoal)
    FakeStaticShoal.made = []
    return FakeStaticShoal.made


def static(*arguments, **options):
    result = runner.invoke(app, ["static", *arguments], catch_exceptions=False, **options)
    assert result.exit_code == 0, result.output
    return result


def test_flags_become_the_setup(fake):
    static(
        "--service", "s=smollm2,dtype=float32", "a", "b", "c", "--preset", "lb", "--workers", "3",
        "--slice", "32", "--interval", "500ms", "--max-batch", "8", "--engine", "ds", "--kv-memory", "1GiB",
        "--threads", "1", "--rate", "4", "--chat", "--max-tokens", "64", "--ignore-eos", "--stop", "x",
        "--profile", "p.json",
    )  # fmt: skip
    [made] = fake
    assert made.service == Service(name="s", model="smollm2", dtype="float32")
    assert (made.setup.preset, made.setup.workers, made.setup.slice_tokens) == ("lb", 3, 32)
    assert (made.setup.interval_s, made.setup.max_batch, made.setup.engine) == (0.5, 8, "ds")
    assert (made.setup.kv_bytes, made.setup.threads, str(made.setup.profile)) == (2**30, 1, "p.json")
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, stop=("x",))
    assert made.asked == (["a", "b", "c"], [sampling] * 3, {"chat": True, "arrivals_s": [0.0, 0.25, 0.5]})


def test_defaults_are_those_of_scls(fake):
    static("-m", "smollm2", "a")
    [made] = fake
    assert made.setup == StaticSetup(preset="scls", workers=2)
    assert made.asked[1:] == (
        [SamplingParams(temperature=0.0, max_tokens=128)],
        {"chat": False, "arrivals_s": None},
    )


def test_it_prints_outputs_and_figures(fake):
    printed = static("-m", "smollm2", "a", "bad").stdout
    assert "[1] 'a'\nA\n[2] 'bad'\nfailed: worker 0 failed\n" in printed
    assert "scls: 2 of 3 requests in 2.0 s" in printed
    figures = {
        "batches": "4",
        "mean batch size": "1.2",
        "throughput": "1.00 requests/s, 1234.5 tokens/s",
        "response time, mean / p95": "0.50 / 1.90 s",
        "output tokens": "2,469",
        "invalid tokens (after an end)": "11",
        "pad tokens": "1,007",
        "prompt tokens prefilled": "60",
        "of these prefilled again": "17",
        "requests by batches they took": "2 in 1, 1 in 3",
        "batches that returned early": "25.0%",
        "workers completed, std": "0.50 s",
        "error of estimated time": "-",
        "failed": "1",
    }
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines() if "  " in line.strip()]
    assert {row[0]: row[1] for row in rows} == figures
    assert report_table("scls", replace(REPORT, failed=0)).row_count == len(figures) - 1


def test_it_writes_outputs_and_figures(fake, tmp_path):
    lines, both = tmp_path / "out.jsonl", tmp_path / "all.json"
    printed = static("-m", "smollm2", "a", "bad", "-o", str(lines), "--json", str(both)).stdout
    assert "[1]" not in printed
    written = json.loads(both.read_text())
    assert written["outputs"] == [json.loads(line) for line in lines.read_text().splitlines()]
    assert (written["preset"], written["workers"]) == ("scls", 2)
    assert written["report"]["slices"] == {"1": 2, "3": 1}
    assert written["report"]["tokens"]["pad_tokens"] == 1007
    assert written["report"]["estimate_error"] is None
    good, bad = written["outputs"]
    assert (good["prompt"], good["text"], good["finish_reason"]) == ("a", "A", "stop")
    assert good["record"] == {"first_token_s": 1.0, "response_s": 3.0}
    assert (bad["error"], bad["record"]) == ("worker 0 failed", None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hi"], "no model: name one with --model"),
        (["-m", "smollm2"], "no prompt"),
        (["-m", "smollm2", "hi", "--preset", "slcs"], "scls"),
        (["-m", "smollm2", "hi", "--engine", "tgi"], "ds, hf"),
        (["-m", "smollm2", "hi", "--preset", "sls", "--interval", "1s"], "no batching interval"),
        (["-m", "smollm2", "hi", "--interval", "soon"], "--interval: expected a time"),
        (["-m", "smollm2", "hi", "--kv-memory", "much"], "--kv-memory: expected a size"),
        (["-m", "smollm2", "hi", "--workers", "0"], "workers must be at least 1, got 0"),
        (["-m", "smollm2", "hi", "--slice", "0"], "slice_tokens must be at least 1, got 0"),
        (["-m", "smollm2", "hi", "--rate", "0"], "--rate must be more than 0"),
        (["-m", "no-such-model", "hi"], "no-such-model"),
    ],
)
def test_mistakes_are_one_red_line_and_exit_code_2(arguments, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert run(["static", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_help_has_examples_and_every_preset():
    output = runner.invoke(app, ["static", "--help"], terminal_width=200).output
    assert "Examples:" in output
    assert output.count("shoal static") >= 2
    words = set(re.findall(r"[\w-]+", output))
    assert words >= {*STATIC_PRESETS, *STATIC_ENGINES}


def test_help_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from shoal.cli.app import run\n"
        "run(['static', '--help'])\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
