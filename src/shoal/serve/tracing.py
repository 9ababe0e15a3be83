"""OpenTelemetry: a span for every call, with a child for each phase of its requests (extra ``otel``).

Names follow OpenTelemetry's semantic conventions for generative AI; ``gen_ai.latency.*`` are vLLM's names.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

import shoal
from shoal.core import ConfigError, SamplingParams
from shoal.frontend.timeline import Phase, Timeline
from shoal.serve.http.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger(__name__)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
"""By path: what is traced."""
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER_GROUP = "opentelemetry_traces_exporter"
_INSTALL = "pip install 'shoal[otel]'"
_SERVER_ERROR = 500
_CLOSE_S = 5.0
_Attribute = str | int | float | list[str]


class Tracing(Protocol):
    """Makes the spans of calls."""

    def begin(self, context: RequestContext, scope: Scope) -> None:
        """A request came: begin its span, if it is a call."""

    def end(self, context: RequestContext, scope: Scope) -> None:
        """It has ended: end its span, and add those of its phases."""

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""


class NoTracing:
    """Makes no spans."""

    def begin(self, context: RequestContext, scope: Scope) -> None:
        pass

    def end(self, context: RequestContext, scope: Scope) -> None:
        pass

    def close(self) -> None:
        pass


class SpanTracing:
    """Makes spans by an OpenTelemetry provider."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("shoal", shoal.__version__)

    def begin(self, context: RequestContext, scope: Scope) -> None:
        """As in ``Tracing``; the parent is that of the request's ``traceparent``."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return
        # For each call: the clocks drift apart when the time of day is set, or the machine sleeps.
        context.epoch_ns = time.time_ns() - time.monotonic_ns()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context.span = self._tracer.start_span(
            operation,
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "shoal"},
            start_time=context.arrival_ns + context.epoch_ns,
        )
        context.traceparent = _traceparent(context.span)

    def end(self, context: RequestContext, scope: Scope) -> None:
        """As in ``Tracing``."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span = context.span
        if span is None:
            return
        end_ns = context.end_ns + context.epoch_ns
        for name, value in _attributes(context):
            span.set_attribute(name, value)
        if context.service is not None:
            span.update_name(f"{_OPERATIONS[scope['path']]} {context.service}")
        if context.status >= _SERVER_ERROR or context.why:
            span.set_attribute("error.type", str(context.status))
            if context.status >= _SERVER_ERROR:
                span.set_status(Status(StatusCode.ERROR, context.why))
        parent = set_span_in_context(span)
        for choice, timeline in enumerate(context.timelines):
            for phase, engine, begin_ns, phase_end_ns in _phases(timeline, context.end_ns):
                attributes: dict[str, _Attribute] = {"shoal.choice": choice}
                if engine is not None:
                    attributes["shoal.engine"] = engine
                child = self._tracer.start_span(
                    phase.value, parent, attributes=attributes, start_time=begin_ns + context.epoch_ns
                )
                child.end(phase_end_ns + context.epoch_ns)
            for engine, at_ns in _moves(timeline):
                span.add_event(
                    "moved", {"shoal.engine": engine, "shoal.choice": choice}, at_ns + context.epoch_ns
                )
        span.end(end_ns)

    def close(self) -> None:
        """As in ``Tracing``; a collector that does not answer would keep the exporter for longer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def tracing_from_environment(environment: Mapping[str, str] = os.environ) -> Tracing:
    """Spans with the exporters that OpenTelemetry's variables name; none where they name none.

    ``OTEL_TRACES_EXPORTER`` has names separated by commas, such as ``otlp`` and ``console``; an endpoint for
    OTLP alone means ``otlp``. Raises ConfigError for an exporter that is not installed.
    """
    names = environment.get(_EXPORTERS, "otlp" if any(map(environment.get, _ENDPOINTS)) else "")
    exporters = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    if not exporters or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NoTracing()
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            f"{_EXPORTERS} or an OTLP endpoint is set in the environment, but OpenTelemetry is not installed "
            f"here: {_INSTALL}, or set OTEL_SDK_DISABLED=true"
        ) from None
    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "shoal"}))
    for name in exporters:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    _log.info("spans of calls are exported: %s", ", ".join(exporters))
    return SpanTracing(provider)


def _exporter(name: str) -> "SpanExporter":
    found = {point.name: point for point in entry_points(group=_EXPORTER_GROUP)}
    # OTLP over HTTP needs no compiled library; gRPC is taken where only that is installed.
    for known in (f"{name}_proto_http", f"{name}_proto_grpc") if name == "otlp" else (name,):
        if known in found:
            return found[known].load()()  # type: ignore[no-any-return]
    available = ", ".join(sorted(found)) or "none"
    raise ConfigError(f"{_EXPORTERS}: {name!r} is not installed ({_INSTALL}); there are: {available}")


def _traceparent(span: "Span") -> bytes:
    """The W3C header of a span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


def _attributes(context: RequestContext) -> Iterator[tuple[str, _Attribute]]:
    """What is known of a call that has ended."""
    yield "http.response.status_code", context.status
    yield "shoal.request_id", context.id
    yield "gen_ai.latency.e2e", (context.end_ns - context.arrival_ns) / 1e9
    if context.service is not None:
        yield "gen_ai.request.model", context.service
        yield "gen_ai.response.model", context.service
    if context.key is not None:
        yield "shoal.api_key", context.key.name
    if context.prompt_tokens:
        yield "gen_ai.usage.input_tokens", context.prompt_tokens
        yield "gen_ai.usage.output_tokens", context.output_tokens
    if context.queue_s is not None:
        yield "gen_ai.latency.time_in_queue", context.queue_s
    if context.first_token_s is not None:
        yield "gen_ai.latency.time_to_first_token", context.first_token_s
    if context.load_ns:
        yield "shoal.load_s", context.load_ns / 1e9
    if finishes := [timeline.finish.value for timeline in context.timelines if timeline.finish is not None]:
        yield "gen_ai.response.finish_reasons", finishes
    if context.sampling is not None:
        yield from _sampling_attributes(context.sampling)


def _sampling_attributes(sampling: SamplingParams) -> Iterator[tuple[str, _Attribute]]:
    if sampling.max_tokens is not None:
        yield "gen_ai.request.max_tokens", sampling.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    if sampling.top_k:
        yield "gen_ai.request.top_k", sampling.top_k
    if sampling.frequency_penalty:
        yield "gen_ai.request.frequency_penalty", sampling.frequency_penalty
    if sampling.presence_penalty:
        yield "gen_ai.request.presence_penalty", sampling.presence_penalty
    if sampling.seed is not None:
        yield "gen_ai.request.seed", sampling.seed
    if sampling.n > 1:
        yield "gen_ai.request.choice.count", sampling.n
    if sampling.stop:
        yield "gen_ai.request.stop_sequences", list(sampling.stop)


def _phases(timeline: Timeline, end_ns: int) -> Iterator[tuple[Phase, str | None, int, int]]:
    """(phase, engine, begin, end) of every phase."""
    ends = [begin.begin_ns for begin in timeline.phases[1:]] + [timeline.ended_ns or end_ns]
    for (begin_ns, phase, engine), phase_end_ns in zip(timeline.phases, ends, strict=True):
        yield phase, engine, begin_ns, max(begin_ns, phase_end_ns)


def _moves(timeline: Timeline) -> Iterator[tuple[str, int]]:
    """(engine, time) whenever a request came to another engine than the one that had it before."""
    last: str | None = None
    for begin_ns, _, engine in timeline.phases:
        if engine is not None:
            if last is not None and engine != last:
                yield engine, begin_ns
            last = engine
