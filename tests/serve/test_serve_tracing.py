"""Spans of calls, read back by the exporter that keeps them in memory, beside the access log."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serve_builders import SERVICES, FakeEngine, InlineWorkers, completion, make_client, make_tokenizers

from shoal.core import ConfigError, FinishReason
from shoal.frontend.timeline import Phase, Timeline
from shoal.serve import ServerOptions, create_app
from shoal.serve.http.request_context import RequestContext
from shoal.serve.tracing import NoTracing, SpanTracing, tracing_from_environment

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def tracing():
    """A tracing and the exporter that keeps its spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield SpanTracing(provider), exporter
    provider.shutdown()


def calls(path="/v1/completions", body=None, headers=None, engine=None, **options):
    """(answer, spans) of one request to a fake cluster."""

    async def main():
        with tracing() as (tracer, exporter):
            app = create_app(
                engine or FakeEngine(), make_tokenizers(), SERVICES, ServerOptions(**options),
                workers=InlineWorkers(), tracing=tracer,
            )  # fmt: skip
            async with make_client(app) as client:
                answer = await client.post(path, json=completion() if body is None else body, headers=headers)
            return answer, exporter.get_finished_spans()

    return asyncio.run(main())


def test_a_call_is_a_span_with_the_client_s_parent():
    answer, [span] = calls(
        body=completion(temperature=0.5, top_p=0.9, seed=3, max_tokens=7),
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"},
    )
    assert answer.status_code == 200
    assert (span.name, span.kind) == ("text_completion base", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    usage = answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "base",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "http.response.status_code": 200,
        "shoal.request_id": "mine",
    }
    assert {name: span.attributes[name] for name in expected} == expected
    assert span.status.status_code is StatusCode.UNSET


def test_without_a_parent_a_trace_begins():
    answer, [span] = calls(headers={"traceparent": "nonsense"})
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" in answer.headers["traceparent"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/chat/completions",
            {"model": "chat", "messages": [{"role": "user", "content": "a"}]},
            "chat chat",
        ),
        ("/v1/responses", {"model": "chat", "input": "a"}, "chat chat"),
        ("/v1/embeddings", {"model": "base", "input": "a"}, "embeddings base"),
        ("/api/generate", {"model": "base", "prompt": "a", "raw": True}, "text_completion base"),
        ("/api/chat", {"model": "chat", "messages": [{"role": "user", "content": "a"}]}, "chat chat"),
        ("/api/embed", {"model": "base", "input": "a"}, "embeddings base"),
    ],
)
def test_every_api_has_spans(path, body, name):
    answer, [span] = calls(path, body)
    assert answer.status_code == 200, answer.text
    assert span.name == name


def test_calls_that_fail_have_spans_too():
    _, [span] = calls(body=completion(model="other"))
    assert (span.name, span.attributes["http.response.status_code"]) == ("text_completion", 404)
    assert span.attributes["error.type"] == "404"
    assert span.status.status_code is StatusCode.UNSET  # the client's error, not the server's
    _, [span] = calls(engine=FakeEngine(fail_after=1))
    assert (span.attributes["error.type"], span.status.status_code) == ("500", StatusCode.ERROR)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/none"])
def test_other_requests_have_none(path):
    _, spans = calls(path, {"model": "base", "prompt": "a"})
    assert spans == ()


def test_the_times_are_those_of_the_access_log(caplog):
    caplog.set_level(logging.INFO, "shoal.access")
    _, [span] = calls(access_log=True, access_log_format="json")
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "shoal.access"]
    assert span.attributes["gen_ai.latency.e2e"] == pytest.approx(line["total_s"], abs=1e-6)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(line["total_s"], abs=1e-6)
    assert span.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(line["queue_s"], abs=1e-6)
    ttft_s = span.attributes["gen_ai.latency.time_to_first_token"]
    assert ttft_s == pytest.approx(line["first_token_s"], abs=1e-6)


def timeline(*phases, ended_ns=None):
    made = Timeline.from_arrival(1000)
    for phase, engine, at_ns in phases:
        made.begin(phase, engine, at_ns)
    if ended_ns is not None:
        made.end(FinishReason.LENGTH, ended_ns)
    return made


def test_phases_are_children_and_moves_are_events():
    context = RequestContext("id", arrival_ns=1000, service="base", status=200, end_ns=9000)
    context.timelines = [
        timeline(
            (Phase.WAITING, "0", 1100),
            (Phase.PREFILL, "0", 2000),
            (Phase.DECODE, "0", 3000),
            (Phase.PREEMPTED, "0", 4000),
            (Phase.PREFILL, "0", 5000),
            (Phase.DECODE, "0", 6000),
            (Phase.DECODE, "1", 7000),
            ended_ns=8000,
        ),
        timeline((Phase.WAITING, "0", 1100)),
    ]
    scope = {"path": "/v1/completions", "method": "POST", "headers": []}
    with tracing() as (tracer, exporter):
        tracer.begin(context, scope)
        tracer.end(context, scope)
        spans = exporter.get_finished_spans()
    [call] = [span for span in spans if span.parent is None]
    epoch_ns = call.start_time - 1000
    assert call.end_time - epoch_ns == 9000
    found = [
        (span.attributes["shoal.choice"], span.name, span.attributes.get("shoal.engine"),
         span.start_time - epoch_ns, span.end_time - epoch_ns)
        for span in spans if span is not call
    ]  # fmt: skip
    assert found == [
        (0, "waiting", None, 1000, 1100),
        (0, "waiting", "0", 1100, 2000),
        (0, "prefill", "0", 2000, 3000),
        (0, "decode", "0", 3000, 4000),
        (0, "preempted", "0", 4000, 5000),
        (0, "prefill", "0", 5000, 6000),
        (0, "decode", "0", 6000, 7000),
        (0, "decode", "1", 7000, 8000),
        (1, "waiting", None, 1000, 1100),
        (1, "waiting", "0", 1100, 9000),
    ]
    assert all(span.parent.span_id == call.context.span_id for span in spans if span is not call)
    [event] = call.events
    assert (event.name, event.timestamp - epoch_ns, event.attributes["shoal.engine"]) == ("moved", 7000, "1")
    assert call.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_nothing_is_traced_unless_the_environment_says_so():
    for environment in ({}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SERVICE_NAME": "x"}):
        assert isinstance(tracing_from_environment(environment), NoTracing)
    off = {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}
    assert isinstance(tracing_from_environment(off), NoTracing)


def test_exporters_are_those_of_the_environment():
    for environment in (
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "otlp"},
    ):
        traced = tracing_from_environment(environment)
        assert isinstance(traced, SpanTracing)
        traced.close()


def test_an_exporter_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=r"'zipkin' is not installed.*there are: .*console"):
        tracing_from_environment({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_without_opentelemetry_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from shoal.serve.tracing import tracing_from_environment as tracing\n"
        "tracing({})\n"
        "try: tracing({'OTEL_TRACES_EXPORTER': 'otlp'})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("ConfigError")
    assert "pip install 'shoal[otel]'" in done.stdout


def test_a_server_without_spans_does_not_import_opentelemetry():
    program = (
        "import sys, shoal.serve.tracing; print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_call_after_the_clock_was_set_has_the_new_time(monkeypatch):
    day_ns, scope = 86_400 * 10**9, {"path": "/v1/completions", "method": "POST", "headers": []}
    with tracing() as (tracer, exporter):
        now_ns, then_ns = time.time_ns(), time.monotonic_ns()
        monkeypatch.setattr("time.time_ns", lambda: now_ns + day_ns)
        monkeypatch.setattr("time.monotonic_ns", lambda: then_ns)
        context = RequestContext("id", arrival_ns=then_ns - 5, status=200, end_ns=then_ns)
        tracer.begin(context, scope)
        tracer.end(context, scope)
        [span] = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (now_ns + day_ns - 5, now_ns + day_ns)
