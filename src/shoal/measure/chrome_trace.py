"""Chrome trace of a run (JSON), for Perfetto and chrome://tracing.

Each engine is a process, with a thread of steps for each service, counters of memory and requests, and an
asynchronous span for each request, divided into time to first token and decoding.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from shoal.measure.records import RequestRow, RunRecord

Event = dict[str, Any]


def trace_events(run: RunRecord) -> Iterator[Event]:
    """The events of a run; times are microseconds on the run's clock, exact to the nanosecond."""
    services = sorted({row.service for row in run.requests} | {span.service for span in run.spans})
    threads = {service: number + 1 for number, service in enumerate(services)}
    yield from _names(run, threads)
    for span in run.spans:
        yield {
            "ph": "X",
            "name": f"{span.steps} steps"
            if span.steps > 1
            else _step_name(span.prefill_tokens, span.decodes),
            "cat": "step",
            "pid": _process(span.engine),
            "tid": threads[span.service],
            "ts": span.start_ns / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
            "args": {"steps": span.steps, "decodes": span.decodes, "prefill_tokens": span.prefill_tokens},
        }
    for sample in run.samples:
        common = {"ph": "C", "pid": _process(sample.engine), "tid": 0, "ts": sample.time_ns / 1e3}
        yield {**common, "name": "kv_used", "args": {"share": round(sample.kv_used, 6)}}
        yield {**common, "name": "waiting", "args": {"requests": sample.waiting}}
        yield {**common, "name": "running", "args": {"requests": sample.running}}
    for number, row in enumerate(run.requests):
        yield from _request_events(number, row, threads[row.service])


def write_trace(run: RunRecord, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_json_lines(trace_events(run)))


def _json_lines(events: Iterable[Event]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":['
    separator = "\n"
    for event in events:
        yield separator + json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _process(engine: int) -> int:
    """Viewers reserve process 0 for idle time; process 1 has the requests that no engine served."""
    return engine + 2


def _step_name(prefill_tokens: int, decodes: int) -> str:
    if not prefill_tokens:
        return "decode"
    return "mixed" if decodes else "prefill"


def _names(run: RunRecord, threads: dict[str, int]) -> Iterator[Event]:
    used = chain(
        range(len(run.engines)),
        (row.engine for row in run.requests),
        (span.engine for span in run.spans),
        (sample.engine for sample in run.samples),
    )
    for engine in sorted(set(used)):
        process = {"ph": "M", "pid": _process(engine), "tid": 0, "ts": 0}
        name = f"engine {engine}" if engine >= 0 else "no engine"
        yield {**process, "name": "process_name", "args": {"name": name}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": _process(engine)}}
        for service, thread in threads.items():
            yield {**process, "tid": thread, "name": "thread_name", "args": {"name": service}}


def _request_events(number: int, row: RequestRow, thread: int) -> Iterator[Event]:
    """Spans of one request. With equal names, a viewer packs requests that do not overlap into one lane."""
    common = {"cat": "request", "id": number, "pid": _process(row.engine), "tid": thread}
    arrival, first, end = row.arrival_ns / 1e3, row.first_token_ns / 1e3, row.finish_ns / 1e3
    details = {
        "request": row.request_id,
        "finish": row.finish,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "cached_tokens": row.cached_tokens,
        "preemptions": row.preemptions,
    }
    if row.error is not None:
        details["error"] = row.error
    name = f"requests of {row.service}"
    yield {"ph": "b", "name": name, "ts": arrival, **common, "args": details}
    if row.output_tokens:
        yield {"ph": "b", "name": "to first token", "ts": arrival, **common, "args": {}}
        yield {"ph": "e", "name": "to first token", "ts": first, **common, "args": {}}
    if row.output_tokens > 1:
        yield {"ph": "b", "name": "decoding", "ts": first, **common, "args": {}}
        yield {"ph": "e", "name": "decoding", "ts": end, **common, "args": {}}
    yield {"ph": "e", "name": name, "ts": end, **common, "args": {}}
