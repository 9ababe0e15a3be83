"""The trace is valid Chrome JSON: every event has what its phase needs, and spans lie where the run says."""

import json
from collections import Counter

import pytest
from measure_builders import NS, make_row, make_run, random_run, refused_row

from shoal.measure import Sample, StepSpan, trace_events, write_trace

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
}


@pytest.fixture
def run():
    return random_run()


def load(run, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(run, path)
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def test_every_event_has_what_its_phase_needs(run, tmp_path):
    events = load(run, tmp_path)
    assert events == list(trace_events(run))
    for event in events:
        assert set(event) >= NEEDED[event["ph"]]
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    phases = Counter(event["ph"] for event in events)
    assert phases["X"] == len(run.spans)
    assert phases["C"] == 3 * len(run.samples)
    assert phases["b"] == phases["e"] > len(run.requests)


def test_processes_are_engines_and_threads_services(run, tmp_path):
    named = [event for event in load(run, tmp_path) if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["engine 0", "engine 1", "no engine"]
    assert 0 not in processes
    for event, span in zip((e for e in trace_events(run) if e["ph"] == "X"), run.spans, strict=True):
        assert processes[event["pid"]] == f"engine {span.engine}"
        assert threads[event["pid"], event["tid"]] == span.service
        assert event["args"] == {
            "steps": span.steps, "decodes": span.decodes, "prefill_tokens": span.prefill_tokens
        }  # fmt: skip


def test_async_spans_nest_and_are_closed(run):
    open_spans = {}
    for event in trace_events(run):
        if event["ph"] not in "be":
            continue
        stack = open_spans.setdefault((event["pid"], event["cat"], event["id"]), [])
        if event["ph"] == "b":
            assert not stack or event["ts"] >= stack[-1]["ts"]
            stack.append(event)
        else:
            begun = stack.pop()
            assert (begun["name"], begun["tid"]) == (event["name"], event["tid"])
            assert begun["ts"] <= event["ts"]
    assert len(open_spans) == len(run.requests)
    assert not any(open_spans.values())


def test_times_are_microseconds_to_the_nanosecond():
    row = make_row("r", arrival=1, first=2.000000001, end=3, output=2)
    span = StepSpan(0, "chat", 1_234_567, 1_234_999, 1, 0, 10)
    sample = Sample(5 * NS, 0, 3, 4, 0.25, 1.0)
    events = list(trace_events(make_run([row], spans=[span], samples=[sample])))
    step = next(event for event in events if event["ph"] == "X")
    assert (step["ts"], step["dur"], step["name"]) == (1234.567, 0.432, "prefill")
    spans = [(event["ph"], event["name"], event["ts"]) for event in events if event["ph"] in "be"]
    assert spans == [
        ("b", "requests of chat", 1e6),
        ("b", "to first token", 1e6),
        ("e", "to first token", 2000000.001),
        ("b", "decoding", 2000000.001),
        ("e", "decoding", 3e6),
        ("e", "requests of chat", 3e6),
    ]
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters == {"kv_used": {"share": 0.25}, "waiting": {"requests": 3}, "running": {"requests": 4}}


def test_refused_requests_have_a_place_of_their_own():
    events = [event for event in trace_events(make_run([refused_row()])) if event["ph"] == "b"]
    assert [event["name"] for event in events] == ["requests of chat"]
    assert events[0]["pid"] == 1
    assert events[0]["args"]["error"].startswith("needs 9,000 blocks")


def test_events_come_one_at_a_time(run):
    events = trace_events(run)
    assert next(events)["ph"] == "M"
