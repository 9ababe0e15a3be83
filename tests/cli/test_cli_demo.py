import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from cli_builders import METRICS, FakeApi, fake_server
from rich.console import Console

from shoal.cli.demo.client import (
    Burst,
    DemoRequest,
    Kill,
    kill_engine_during,
    make_burst,
    run_burst,
    time_alone,
)
from shoal.cli.demo.metrics import MetricsSummary
from shoal.cli.demo.prompts import (
    CHAT,
    COMPLETE,
    DemoPrompt,
    demo_goals,
    demo_prompts,
    format_goals,
    typical_prompts,
)
from shoal.cli.demo.report import Latency, comparison, report_notes, summarise
from shoal.cli.demo.run import ONE_MODEL_BYTES, DemoSetup, ServerProcess, free_port, print_report, send_burst
from shoal.cli.demo.view import BurstView, single_line
from shoal.cli.output import json_text
from shoal.config import load_config
from shoal.core import SLO, EngineDied, ShoalError
from shoal.serve import ServerOptions


def make_demo_request(number, service, *, sent=0.0, first=0.5, end=1.5, tokens=11, finish="stop", **slo):
    """A request that has ended, with two chunks of text."""
    request = DemoRequest(number, DemoPrompt(service, "hi", 16, chat=service == CHAT), SLO(**slo))
    answer = request.answer
    answer.sent_ns, *answer.chunks_ns = (int(t * 1e9) for t in (sent, first, end))
    answer.end_ns, answer.pieces, answer.output_tokens = int(end * 1e9), ["some", " text"], tokens
    answer.finish = finish
    return request


def send(url, prompts, alone_s=None, **options):
    """The burst of these prompts, sent."""
    burst = make_burst(prompts, alone_s)
    asyncio.run(run_burst(url, burst, **options))
    return burst


def test_prompts_alternate_between_the_services():
    prompts = demo_prompts(24)
    assert [p.service for p in prompts[:4]] == [CHAT, COMPLETE, CHAT, COMPLETE]
    assert len({p.text for p in prompts}) == 24
    assert all(p.chat == (p.service == CHAT) for p in prompts)
    assert len({p.max_tokens for p in prompts}) > 2
    assert len(demo_prompts(1000, max_tokens=1)) == 1000


@pytest.mark.parametrize(("share", "chats"), [(0.75, 18), (0.5, 12), (0, 0), (1, 24), (0.1, 3)])
def test_a_share_of_the_prompts_are_chats(share, chats):
    prompts = demo_prompts(24, chat_share=share)
    assert [prompt.chat for prompt in prompts].count(True) == chats
    assert all(
        abs(sum(prompt.chat for prompt in prompts[:count]) - share * count) < 1 for count in range(1, 25)
    )


def test_the_typical_prompt_has_about_the_mean_limit():
    prompts = [DemoPrompt(CHAT, str(limit), limit, chat=True) for limit in (10, 45, 70, 100)]
    prompts.append(DemoPrompt(COMPLETE, "only", 7, chat=False))
    assert [prompt.text for prompt in typical_prompts(prompts)] == ["45", "only"]
    assert [prompt.max_tokens for prompt in typical_prompts(demo_prompts(24, 96))] == [96, 96]
    assert [prompt.service for prompt in typical_prompts(demo_prompts(1))] == [CHAT]


def test_goals_follow_from_the_times_alone():
    goals = demo_goals({CHAT: 4.1, COMPLETE: 2.0})
    assert goals == {CHAT: SLO(e2e_s=pytest.approx(32.8)), COMPLETE: SLO(e2e_s=16)}
    assert format_goals(SLO(ttft_s=10, e2e_s=20.5)) == "TTFT 10 s, E2E 20.5 s"
    assert demo_goals({}) == {}


def test_requests_are_timed_alone_one_after_the_other():
    api = FakeApi(reject={"complete": (429, "full")})
    with fake_server(api) as url:
        alone_s = asyncio.run(time_alone(url, typical_prompts(demo_prompts(6))))
    assert list(alone_s) == [CHAT]
    assert alone_s[CHAT] > 0
    assert [body["model"] for body in api.bodies] == [CHAT, COMPLETE]
    assert not any("slo" in body for body in api.bodies)


def test_goals_are_sent_with_the_requests():
    api = FakeApi()
    with fake_server(api) as url:
        burst = send(url, demo_prompts(4), {CHAT: 2.0})
    sent = {body["model"]: body.get("slo") for body in api.bodies}
    assert sent == {CHAT: {"ttft": None, "tpot": None, "mtpot": None, "e2e": 16}, COMPLETE: None}
    report = summarise(burst)
    assert report.services[CHAT].slo == SLO(e2e_s=16)
    assert report.services[CHAT].slo_attainment == 1.0
    assert math.isnan(report.services[COMPLETE].slo_attainment)


def test_a_burst_is_sent_to_both_endpoints_and_timed():
    api = FakeApi()
    ended = []
    with fake_server(api) as url:
        burst = send(url, demo_prompts(6), on_end=ended.append)
    assert [e.status for e in burst.requests] == ["done"] * 6
    assert {e.text for e in burst.requests} == {"Hello there!"}
    records = [request.record() for request in burst.requests]
    assert {(e.prompt_tokens, e.output_tokens, e.finish) for e in records} == {(5, 3, "stop")}
    assert all(e.arrival_ns <= e.first_token_ns <= e.finish_ns for e in records)
    assert sorted(request.number for request in ended) == [1, 2, 3, 4, 5, 6]
    assert sum("messages" in body for body in api.bodies) == 3
    assert sum("prompt" in body for body in api.bodies) == 3
    assert all(body["stream_options"] == {"include_usage": True} for body in api.bodies)
    assert burst.metrics == MetricsSummary({"chat": 3, "complete": 0}, 0.75, 0.125)


def test_the_counts_are_those_after_the_last_response():
    old = 'shoal_preemptions_total{service="chat"} 1.0\nshoal_engine_state_age_seconds 1000.0\n'
    new = 'shoal_preemptions_total{service="chat"} 2.0\nshoal_engine_state_age_seconds 0.0\n'
    with fake_server(FakeApi(pages=[old] * 3 + [new] * 50)) as url:
        assert send(url, demo_prompts(2)).metrics.preemptions == {"chat": 2}


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        (FakeApi(reject={"chat": (400, "no chat_template")}), "status 400: no chat_template"),
        (FakeApi(cut=True), "the stream ended before the answer did"),
        (FakeApi(break_off="the engine died"), "the engine died"),
    ],
)
def test_unfinished_requests_are_reported(api, expected):
    with fake_server(api) as url:
        burst = send(url, demo_prompts(1))
    report = summarise(burst)
    assert not report.succeeded
    assert report.failures == (f"chat 1: {expected}",)


def test_a_server_that_is_gone_fails_every_request():
    with pytest.raises(Exception, match="connection"):
        send(f"http://127.0.0.1:{free_port()}", demo_prompts(2))


def test_metrics_keep_peaks_and_the_last_counts():
    summary = MetricsSummary()
    summary.add(METRICS)
    summary.add(
        METRICS.replace("1.8874368e+07", "1e+07").replace('service="chat"} 3.0', 'service="chat"} 4.0')
    )
    assert (summary.peak_use, summary.peak_waste, summary.preemptions["chat"]) == (0.75, 0.125, 4)
    assert MetricsSummary().peak_use is None


def test_metrics_of_several_engines_are_summed_and_dead_ones_do_not_age():
    page = METRICS + METRICS.replace('engine="0"', 'engine="b"').replace("# TYPE", "# HELP")
    page += (
        'shoal_engine_up{engine="0"} 1.0\nshoal_engine_up{engine="b"} 0.0\n'
        'shoal_engine_state_age_seconds{engine="0"} 0.5\nshoal_engine_state_age_seconds{engine="b"} 77.0\n'
        'shoal_requests_resumed_total{service="chat"} 4.0\n'
        'shoal_requests_resumed_total{service="complete"} 2.0\n'
    )
    summary = MetricsSummary()
    summary.add(page)
    assert summary == MetricsSummary({"chat": 6, "complete": 0}, 0.75, 0.125, 0.5, 6)


def test_fetches_of_weights_and_waits_for_them_are_reported(tmp_path):
    page = METRICS + (
        'shoal_weight_fetches_total{engine="0",service="chat"} 3.0\n'
        'shoal_weight_fetches_total{engine="0",service="complete"} 2.0\n'
        'shoal_weight_waits_total{engine="0",service="chat"} 4.0\n'
        'shoal_weight_wait_seconds_total{engine="0",service="chat"} 6.0\n'
    )
    summary = MetricsSummary()
    summary.add(page)
    report = summarise(Burst([make_demo_request(1, CHAT)], metrics=summary, duration_s=1.0))
    told = "weights: 5 fetches, for which requests waited 4 times, 1.5 s on average"
    assert told in list(report_notes(report))
    assert report.to_json()["fetches"] == 5
    without = summarise(Burst([make_demo_request(1, CHAT)], metrics=MetricsSummary(), duration_s=1.0))
    assert not [note for note in report_notes(without) if "weights" in note]


def test_the_shared_engine_may_have_less_memory_than_its_weights_need(tmp_path):
    for weight_bytes in (700 << 20, None):
        setup = DemoSetup(kv_bytes=24 << 20, preset="shoal", weight_bytes=weight_bytes)
        for text, expected in (
            (setup.shared_config(), weight_bytes),
            (setup.separate_config(2), None),
            (setup.tight_config(), ONE_MODEL_BYTES),
        ):
            (tmp_path / "shoal.yaml").write_text(text)
            for engine in load_config(ServerOptions, file=tmp_path / "shoal.yaml").engine_plans():
                assert engine.options.weights.memory_bytes == expected


def engine_card(name, pid, requests):
    return {"name": name, "state": "ready", "pid": pid, "requests": requests}


def test_an_engine_is_killed_during_the_burst(monkeypatch):
    killed, go_on = [], threading.Event()

    def kill(pid, number):
        killed.append((pid, number))
        go_on.set()

    monkeypatch.setattr("shoal.cli.demo.client.os.kill", kill)
    monkeypatch.setenv("SHOAL_ADMIN_KEY", "sk-admin")
    cards = [engine_card("0", 70, 2), engine_card("1", 71, 5), engine_card("2", None, 0)]
    page = METRICS + 'shoal_requests_resumed_total{service="chat"} 5.0\n'
    api = FakeApi(admin={"engines": {"data": cards}}, wait=go_on, pages=[page] * 50)
    with fake_server(api) as url:
        burst = send(url, demo_prompts(8), kill=True)
    assert killed == [(71, signal.SIGKILL)]
    assert burst.kill == Kill("1", 71, 5)
    assert api.headers[0]["Authorization"] == "Bearer sk-admin"
    report = summarise(burst)
    assert report.succeeded
    told = "engine 1 (process 71) was killed with 5 requests under way: 5 went on, none failed"
    assert told in list(report_notes(report))
    assert report.to_json()["kill"] == {"engine": "1", "pid": 71, "requests": 5}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((403, {"error": {"message": "only this machine"}}), "only this machine"),
        ({"data": [engine_card("0", 70, 0)]}, "no engine has a request"),
        ({"data": [engine_card("0", None, 3)]}, "no engine has a request"),
    ],
)
def test_a_kill_without_requests_is_reported(answer, message):
    with fake_server(FakeApi(admin={"engines": answer})) as url, pytest.raises(ShoalError, match=message):
        asyncio.run(kill_engine_during(url, lambda: True))


def test_a_burst_that_ends_before_the_kill_is_reported():
    with (
        fake_server(FakeApi(reject={"chat": (400, "no")})) as url,
        pytest.raises(EngineDied, match="was over"),
    ):
        send(url, demo_prompts(1), kill=True)


def test_the_report_follows_the_definitions():
    burst = Burst(
        [
            make_demo_request(1, CHAT, first=0.5, end=1.5, tokens=11),
            make_demo_request(2, CHAT, sent=1, first=2.5, end=2.5, tokens=1),  # a token has no gaps
            make_demo_request(3, COMPLETE, finish="error"),
        ],
        metrics=MetricsSummary({"chat": 2}, 0.5, 0.25),
        duration_s=3.0,
    )
    burst.requests[0].answer.chunks_ns.insert(1, 750_000_000)
    report = summarise(burst)
    chat, complete = report.services["chat"], report.services["complete"]
    assert (chat.requests, chat.finished, chat.output_tokens, chat.preemptions) == (2, 2, 12, 2)
    assert chat.output_tokens_per_s == 4
    assert chat.ttft == Latency(1.0, pytest.approx(1.49))
    assert chat.tpot == Latency(pytest.approx(0.1), pytest.approx(0.1))
    assert chat.e2e == Latency(1.5, 1.5)
    assert chat.largest_gap == Latency(0.75, 0.75)
    assert (complete.finished, complete.preemptions) == (0, 0)
    assert math.isnan(complete.ttft.mean_s)
    assert not report.succeeded


def test_attainment_and_normalised_latency_follow_the_definitions():
    requests = [
        make_demo_request(1, CHAT, first=0.5, end=1.5, ttft_s=1, e2e_s=2),
        make_demo_request(2, CHAT, first=1.5, end=1.8, ttft_s=1, e2e_s=2),
        make_demo_request(3, CHAT, first=0.5, end=2.7, ttft_s=1, e2e_s=2),
        make_demo_request(4, CHAT, finish="error", ttft_s=1, e2e_s=2),
        make_demo_request(5, COMPLETE),
        make_demo_request(6, COMPLETE, finish="error"),
    ]
    report = summarise(Burst(requests, {CHAT: 0.5}))
    chat, complete = report.services[CHAT], report.services[COMPLETE]
    assert chat.slo_attainment == 0.25
    assert chat.normalised_latency == pytest.approx((1.5 + 1.8 + 2.7) / 3 / 0.5)
    assert chat.alone_s == 0.5
    assert math.isnan(complete.slo_attainment)
    assert math.isnan(complete.normalised_latency)


def test_the_report_is_a_table_and_json():
    requests = [make_demo_request(1, CHAT, e2e_s=2.5), make_demo_request(2, COMPLETE, finish="error")]
    burst = Burst(requests, {CHAT: 0.5}, duration_s=2.0)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report = summarise(burst)
    print_report(report, console)
    text = console.export_text()
    for part in (
        "TTFT",
        "TPOT",
        "E2E",
        "x alone: mean E2E over that of one request alone (chat 0.5 s)",
        "SLO: share within chat E2E 2.5 s",
        "100%",
        "preemptions: chat 0, complete 0",
        "1/1",
        "0/1",
        "500/500 ms",
        "1.5/1.5 s",
        "failed: complete 2",
    ):
        assert part in text
    written = json.loads(json_text(report.to_json()))
    assert written["services"]["chat"]["ttft"] == {"mean_s": 0.5, "p99_s": 0.5}
    assert written["services"]["complete"]["ttft"]["mean_s"] is None
    assert written["services"]["chat"]["normalised_latency"] == 3
    assert written["services"]["chat"]["slo"]["e2e_s"] == 2.5
    assert written["services"]["chat"]["slo_attainment"] == 1
    assert written["services"]["complete"]["slo_attainment"] is None
    assert written["succeeded"] is False
    assert written["kv_peak_use"] is None


def test_the_table_fits_a_narrow_terminal():
    slow = {"first": 99.4, "end": 199.3, "tokens": 501, "ttft_s": 10, "e2e_s": 200.25}
    requests = [make_demo_request(n, service, **slow) for n, service in ((1, CHAT), (2, COMPLETE))]
    burst = Burst(requests, {CHAT: 40.05, COMPLETE: 1.55}, duration_s=200.0)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_report(summarise(burst), console)
    text = console.export_text()
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "129" in text
    assert "99.4/99.4 s" in text
    assert "200/200 ms" in text


def test_an_engine_for_each_model_has_half_of_cores_and_memory(tmp_path):
    setup = DemoSetup(kv_bytes=24 << 20, preset="vllm", compare=True)
    read = {}
    for name, text in (("shared", setup.shared_config()), ("separate", setup.separate_config(threads=5))):
        (tmp_path / name).write_text(text)
        read[name] = load_config(ServerOptions, file=tmp_path / name)
    [shared] = read["shared"].engine_plans()
    engines = read["separate"].engine_plans()
    assert ([shared.options.kv_cache.memory_bytes], [shared.options.threads]) == ([24 << 20], [None])
    assert [engine.options.kv_cache.memory_bytes for engine in engines] == [12 << 20] * 2
    assert [engine.options.threads for engine in engines] == [2, 2]
    assert [[service.name for service in engine.options.services] for engine in engines] == [
        [CHAT],
        [COMPLETE],
    ]


def test_the_comparison_is_of_the_whole_burst_and_of_its_requests():
    bursts = [
        Burst(
            [make_demo_request(1, CHAT, end=end), make_demo_request(2, COMPLETE, end=2 * end)],
            duration_s=3 * end,
        )
        for end in (1.0, 2.0)
    ]
    lines = list(comparison(*map(summarise, bursts)))
    assert lines[1] == "the burst took 0.50 times as long, a request on average 0.50 times."
    lines += comparison(*map(summarise, bursts), replace(summarise(bursts[1]), fetches=12))
    assert lines[-3] == "the burst took 2.00 times as long, a request on average 2.00 times."
    assert lines[-2].startswith("Weights were fetched 12 times")
    assert all(len(line) <= 80 for line in lines)


def test_without_a_terminal_each_request_is_one_line():
    console = Console(width=100, record=True, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with fake_server(FakeApi(words=["two\n", "lines"], reject={"complete": (429, "full")})) as url:
        send_burst(url, demo_prompts(2), console, {})
    lines = console.export_text().splitlines()
    assert len(lines) == 2
    assert any(line.endswith("...two lines") for line in lines)
    assert any("failed" in line and "status 429: full" in line for line in lines)


def test_on_a_terminal_every_request_has_its_line():
    console = Console(width=80, height=40, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    requests = make_burst(demo_prompts(3)).requests
    requests[1] = make_demo_request(2, COMPLETE)
    requests[2].answer.chunks_ns.append(1)
    view = BurstView(console, requests)
    console.print(view.render())
    text = console.export_text()
    assert [text.count(status) for status in ("waiting", "streaming", "done")] == [1, 1, 1]
    assert "some text" in text


def test_one_line_hides_control_characters():
    assert single_line("a\nb\t c \x1b[31m") == "a b c  [31m"


SLEEPER = "import sys, time; print('my last words', flush=True); time.sleep(float(sys.argv[1]))"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_that_ends_early_shows_what_it_printed():
    command = [sys.executable, "-c", SLEEPER, "0"]
    with pytest.raises(EngineDied, match="my last words"), ServerProcess([], free_port(), command) as server:
        server.wait_ready(30)


def test_a_server_that_is_never_ready_is_stopped():
    command = [sys.executable, "-c", SLEEPER, "600"]
    with ServerProcess([], free_port(), command) as server:
        pid = server.pid
        with pytest.raises(EngineDied, match="not ready"):
            server.wait_ready(0.5)
    assert not alive(pid)


def test_a_server_is_ready_when_health_is_ok():
    command = [sys.executable, "-c", SLEEPER, "600"]
    with fake_server(FakeApi()) as url, ServerProcess([], int(url.rpartition(":")[2]), command) as server:
        server.wait_ready(30)


def test_a_killed_demo_leaves_no_server_behind(tmp_path):
    pid_file = tmp_path / "pid"
    program = (
        "import sys, time\n"
        "from shoal.cli.demo.run import _sigterm_as_interrupt\n"
        "from shoal.cli.demo.run import ServerProcess\n"
        f"command = [sys.executable, '-c', {SLEEPER!r}, '600']\n"
        "with _sigterm_as_interrupt(), ServerProcess([], 1, command) as server:\n"
        f"    open({str(pid_file)!r}, 'w').write(f'{{server.pid}}\\n')\n"
        "    time.sleep(600)\n"
    )
    demo = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    assert alive(pid)
    demo.send_signal(signal.SIGTERM)
    demo.wait(60)
    assert not alive(pid)
