"""``shoal bench`` from the command line, against a server that answers as told."""

import json
import os
import signal
import threading

import pytest
from cli_builders import FakeApi, fake_server
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.scenario_file import load_workload
from shoal.core import ConfigError, ShoalError
from shoal.measure import Verdict
from shoal.workload import Poisson, Replay

FAST = ("--rate", "1000", "--requests", "6")


def run(url, *arguments):
    return CliRunner().invoke(app, ["bench", url, *arguments], catch_exceptions=True)


def test_all_models_of_a_server_are_asked_and_reported():
    api = FakeApi()
    with fake_server(api) as url:
        result = run(url, *FAST)
    assert result.exit_code == 0, result.output
    first, sent = api.bodies[:2], api.bodies[2:]
    assert [body["max_tokens"] for body in first] == [1, 1]
    assert {body["model"] for body in sent} == {"chat", "complete"}
    assert len(sent) == 6
    assert all(body["ignore_eos"] and body["stream"] for body in sent)
    for words in ("6 requests in", "6/6", "TTFT", "requests/s", "chat, complete"):
        assert words in result.output


def test_chosen_models_are_asked_with_chats():
    api = FakeApi()
    with fake_server(api) as url:
        result = run(f"{url}/v1/", "--model", "chat", "--chat", "--no-ignore-eos", *FAST)
    assert result.exit_code == 0, result.output
    assert {body["model"] for body in api.bodies} == {"chat"}
    assert all("messages" in body and "ignore_eos" not in body for body in api.bodies)


def test_clients_ask_again_when_they_are_answered(tmp_path):
    with fake_server(FakeApi()) as url:
        result = run(url, "--clients", "2", "--requests", "5", "--json", str(tmp_path / "s.json"))
    assert result.exit_code == 0, result.output
    assert "2 clients" in result.output
    assert "Served: 2 clients with" in result.output
    assert json.loads((tmp_path / "s.json").read_text())["overall"]["answered"] == 5


def test_all_files_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    with fake_server(FakeApi()) as url:
        result = run(url, *FAST, "--out", str(tmp_path), "--ttft", "10s", "--tpot", "1s", "--mtpot", "9s")
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"summary.json", "requests.jsonl", "requests.csv", "report.html", "vllm.json"}
    vllm = json.loads((tmp_path / "vllm.json").read_text())
    assert (vllm["completed"], vllm["total_output_tokens"], vllm["failed"]) == (6, 18, 0)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(row["slo_mtpot_s"], row["slo_met"]) for row in rows] == [(9.0, True)] * 6
    report = (tmp_path / "report.html").read_text()
    assert f"<title>chat, complete at {url}, 1000 requests/s</title>" in report
    assert "Waiting for the first token" in report
    assert [row["tokens_on_time"] for row in rows] == [3] * 6


def test_json_is_the_only_standard_output():
    with fake_server(FakeApi()) as url:
        result = CliRunner().invoke(app, ["bench", url, *FAST, "--vllm-json", "-"])
    assert json.loads(result.stdout)["completed"] == 6


def test_failed_requests_are_told_and_others_go_on():
    api = FakeApi()

    def events(body, chat):
        if body["max_tokens"] > 1 and body["model"] == "complete":
            api.reject["complete"] = (400, "not today")
        return FakeApi.events(api, body, chat)

    api.events = events
    with fake_server(api) as url:
        result = run(url, "--clients", "1", "--requests", "12")
    assert result.exit_code == 0, result.output
    assert "failed; the first" in result.output
    assert "status 400: not today" in result.output


def test_a_server_that_refuses_the_first_call_ends_the_run():
    with fake_server(FakeApi(reject={"chat": (400, "ignore_eos: unknown")})) as url:
        result = run(url, *FAST)
    assert isinstance(result.exception, ShoalError)
    assert "chat: status 400: ignore_eos: unknown" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "chta"), "no model 'chta'; it has chat, complete"),
        (("--ttft", "fast"), "--ttft"),
        (("--ttft", "0s"), "--ttft"),
        (("--sweep", "--clients", "4"), "--sweep needs a rate"),
        (("--clients", "4", "--rate", "2"), "rate"),
        (("--workload", "nonsense"), "workload.lengths"),
        (("--requests", "0"), "workload.requests"),
    ],
)
def test_mistakes_are_explained(arguments, words):
    with fake_server(FakeApi()) as url:
        result = run(url, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_keys_are_sent():
    with fake_server(FakeApi(api_key="sk-1")) as url:
        assert run(url, "--api-key", "sk-1", *FAST).exit_code == 0
        assert "wrong key" in str(run(url, "--api-key", "sk-2", *FAST).exception)


def test_a_sweep_reports_the_highest_rate_that_is_sustained(monkeypatch, tmp_path):
    """Answers of the fake server count as late from 32 requests a second on."""

    def found(record):
        return Verdict("served" if float(record.title.split(" at ")[1].split()[0]) < 32 else "late", "Said.")

    monkeypatch.setattr("shoal.cli.bench_run.verdict", found)
    with fake_server(FakeApi()) as url:
        result = run(
            url,
            "--rate",
            "10",
            "--requests",
            "4",
            "--sweep",
            "--sweep-steps",
            "1",
            "--json",
            str(tmp_path / "s"),
        )
    assert result.exit_code == 0, result.output
    title = json.loads((tmp_path / "s").read_text())["title"]
    assert title == "chat, complete at 30 requests/s"
    for rate in (10, 20, 40, 30):
        assert f"{rate} requests/s" in result.output


def test_ctrl_c_ends_a_run_with_the_figures_so_far(monkeypatch):
    api = FakeApi(wait=threading.Event())
    seen = []

    def interrupt(self, run):
        if run.running >= 2 and not seen:
            seen.append(run)
            os.kill(os.getpid(), signal.SIGINT)

    with fake_server(api) as url:
        monkeypatch.setattr("shoal.cli.bench_run._try_each", _skip)
        monkeypatch.setattr("shoal.cli.bench_run._Progress.show", interrupt)
        result = run(url, *FAST)
        api.wait.set()
    assert seen
    assert result.exit_code == 130 or isinstance(result.exception, KeyboardInterrupt | SystemExit)
    assert "cancelled" in result.output


async def _skip(target, services):
    pass


def test_the_default_workload_is_a_hundred_requests_at_one_a_second():
    options = load_workload()
    assert (options.requests, options.arrivals) == (100, Poisson(1.0))


def test_a_scenario_says_the_workload(tmp_path):
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,10,5\n")
    (tmp_path / "s.yaml").write_text("workload: {trace: trace.csv, format: azure, rate: 2}\nservices: [a]\n")
    options = load_workload(file=tmp_path / "s.yaml")
    assert options.trace == tmp_path / "trace.csv"
    assert options.arrivals == Replay(rate=2.0)
