"""Trace format: request logs of an engine, JSON lines with lengths and times (vLLM's and Shoal's).

vLLM's benchmark writes ``input_toks``, ``output_toks`` and ``arrival_time``; some versions also write when
the engine queued a request (``queued_ts``) and its first and last token (``first_token_ts``,
``last_token_ts``). Shoal's ``requests.jsonl`` has other names for the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core import ConfigError, RequestRecord
from shoal.workload.lines import ReadOptions, get_member, json_lines, line_error, parse_int, parse_ns
from shoal.workload.rows import TraceRow, request_ids


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the members of a log."""

    prompt: str
    """Length of the prompt."""
    output: str
    """Length of the output."""
    arrivals: tuple[str, ...]
    """Arrival time: the first of these in the first line."""
    first_token: str
    """Time of the first token."""
    last_token: str
    """Time of the last token."""
    least_output: int
    """0 if the log has requests without an output."""
    like: str
    """An example line."""


_VLLM = _Names(
    "input_toks",
    "output_toks",
    ("queued_ts", "arrival_time"),
    "first_token_ts",
    "last_token_ts",
    1,
    '{"input_toks": 2358, "output_toks": 531, "queued_ts": 36, "first_token_ts": 37, "last_token_ts": 54}',
)
_OURS = _Names(
    "prompt_tokens",
    "output_tokens",
    ("arrival_s",),
    "first_token_s",
    "finish_s",
    0,
    '{"prompt_tokens": 2358, "output_tokens": 531, "arrival_s": 0, "first_token_s": 0.7, "finish_s": 17.6}',
)


def is_request_log(members: Mapping[str, Any]) -> bool:
    """Whether these are the members of a line of a request log."""
    return any({names.prompt, names.arrivals[-1]} <= members.keys() for names in (_VLLM, _OURS))


def read_request_log(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with the time when the engine queued them or, if missing, their arrival time."""
    for _, _, _, row in _lines(path):
        yield row if row.output_tokens else None


def read_measured(path: Path) -> list[RequestRecord]:
    """The answered requests of a log with their times, by arrival; the first arrives at 0.

    Ids are those of ``to_requests``. Raises ConfigError for a log without times or without requests.
    """
    answered = (line for line in _lines(path) if line[3].output_tokens)
    lines = sorted(answered, key=lambda line: line[3].arrival_ns)
    if not lines:
        raise ConfigError(f"{path}: no request was answered; expected lines like {_VLLM.like}")
    begin_ns = lines[0][3].arrival_ns
    records = []
    for request_id, (line, record, names, row) in zip(
        request_ids([row for _, _, _, row in lines]), lines, strict=True
    ):
        first_ns, last_ns = (
            parse_ns(get_member(record, name, path, line, names.like), name, path, line)
            for name in (names.first_token, names.last_token)
        )
        if not row.arrival_ns <= first_ns <= last_ns:
            wrong = f"{names.first_token} is {first_ns / 1e9} and {names.last_token} {last_ns / 1e9}"
            expected = f"times in this order, after the arrival at {row.arrival_ns / 1e9}"
            raise line_error(path, line, wrong, expected)
        records.append(
            RequestRecord(
                request_id=request_id,
                service="measured",
                arrival_ns=row.arrival_ns - begin_ns,
                first_token_ns=first_ns - begin_ns,
                finish_ns=last_ns - begin_ns,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
            )
        )
    return records


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any], _Names, TraceRow]]:
    """Number, members, names and row of every line."""
    names, arrival = _VLLM, ""
    for line, record in json_lines(path, _VLLM.like):
        if not arrival:
            names = _VLLM if _VLLM.prompt in record else _OURS
            arrival = next((name for name in names.arrivals if name in record), names.arrivals[-1])
        time, prompt, output = (
            get_member(record, name, path, line, names.like) for name in (arrival, names.prompt, names.output)
        )
        request_id, service = record.get("request_id"), record.get("service")
        yield (
            line,
            record,
            names,
            TraceRow(
                parse_ns(time, arrival, path, line),
                parse_int(prompt, names.prompt, path, line),
                parse_int(output, names.output, path, line, least=names.least_output),
                request_id=None if request_id is None else str(request_id),
                service=None if service is None else str(service),
            ),
        )
