"""Logs of answered requests: as a trace, and with the times that they took."""

import json
from pathlib import Path

import pytest

from shoal.core import ConfigError, RequestRecord
from shoal.workload import guess_format, load_trace, read_measured, to_requests

VLLM = {
    "request_id": "bench-0", "input_toks": 20, "output_toks": 5, "arrival_time": 1787267980.5,
    "queued_ts": 36.5, "first_token_ts": 37.0, "last_token_ts": 39.0,
}  # fmt: skip
OURS = {
    "request_id": "bench-0", "prompt_tokens": 20, "output_tokens": 5, "arrival_s": 1.5,
    "first_token_s": 2.0, "finish_s": 4.0,
}  # fmt: skip


def write(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def later(line: dict[str, object], **changed: object) -> dict[str, object]:
    """The line a second later, with other values."""
    clocks = ("_s", "_ts", "_time")
    moved = {name: value + 1 if name.endswith(clocks) else value for name, value in line.items()}  # type: ignore[operator]
    return moved | {"request_id": "bench-1"} | changed


@pytest.mark.parametrize("line", [VLLM, OURS])
def test_it_is_a_trace_whose_requests_keep_their_names(line: dict[str, object], tmp_path: Path) -> None:
    path = write(tmp_path, later(line), line)
    assert guess_format(path) == "requests"
    requests = to_requests(load_trace(path).rows, "chat")
    assert [(one.id, one.arrival_ns) for one in requests] == [("bench-0", 0), ("bench-1", 10**9)]
    assert [(len(one.prompt), one.true_output_tokens) for one in requests] == [(20, 5)] * 2


def test_names_that_are_there_twice_are_replaced(tmp_path: Path) -> None:
    rows = load_trace(write(tmp_path, VLLM, later(VLLM, request_id="bench-0"))).rows
    assert [one.id for one in to_requests(rows, "chat")] == ["r0", "r1"]


def test_requests_come_when_the_engine_queued_them(tmp_path: Path) -> None:
    """Not when the server got them, which tokenizes them first."""
    lines = [VLLM, later(VLLM, arrival_time=1787267980.6)]
    assert [row.arrival_ns for row in load_trace(write(tmp_path, *lines)).rows] == [0, 10**9]
    unqueued = [{name: value for name, value in line.items() if name != "queued_ts"} for line in lines]
    times = [row.arrival_ns for row in load_trace(write(tmp_path, *unqueued)).rows]
    assert times == [0, pytest.approx(10**8, abs=1000)]


@pytest.mark.parametrize("line", [VLLM, OURS])
def test_measured_times_begin_with_the_first_arrival(line: dict[str, object], tmp_path: Path) -> None:
    first, second = read_measured(write(tmp_path, later(line), line))
    assert first == RequestRecord(
        request_id="bench-0",
        service="measured",
        arrival_ns=0,
        first_token_ns=5 * 10**8,
        finish_ns=25 * 10**8,
        prompt_tokens=20,
        output_tokens=5,
    )
    assert (second.request_id, second.arrival_ns, second.ttft_s) == ("bench-1", 10**9, 0.5)


def test_our_refused_requests_are_left_out(tmp_path: Path) -> None:
    refused = later(OURS, output_tokens=0, first_token_s=None)
    path = write(tmp_path, refused, OURS)
    trace = load_trace(path)
    assert (len(trace.rows), trace.skipped) == (1, 1)
    assert [one.request_id for one in read_measured(path)] == ["bench-0"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no request was answered; expected lines like"),
        ([later(OURS, output_tokens=0)], "no request was answered"),
        ([VLLM, later(VLLM, output_toks=0)], ":2: output_toks is '0'"),
        ([{"input_toks": 1, "output_toks": 1, "arrival_time": 1}], ":1: no 'first_token_ts'; expected"),
        (
            [VLLM, later(VLLM, first_token_ts=12)],
            r":2: first_token_ts is 12\.0 and last_token_ts 40\.0; expect",
        ),
        ([later(VLLM, last_token_ts=37.5)], ":1: first_token_ts is 38"),
        ([OURS, {"prompt_tokens": 1, "output_tokens": 1}], ":2: no 'arrival_s'"),
    ],
)
def test_logs_without_usable_times_are_refused(
    lines: list[dict[str, object]], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_measured(write(tmp_path, *lines))
