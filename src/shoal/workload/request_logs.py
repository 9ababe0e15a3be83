"""Logs of requests that an engine answered: JSON lines with their lengths, and when they came and went.

vLLM's benchmark writes ``input_toks``, ``output_toks`` and ``arrival_time``, some also when the engine queued
a request (``queued_ts``) and gave its first and last token (``first_token_ts``, ``last_token_ts``). Our own
``requests.jsonl`` has other names for the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core import ConfigError, RequestRecord
from shoal.workload.lines import ReadOptions, get_member, json_lines, line_error, parse_int, parse_ns
from shoal.workload.rows import TraceRow, own_ids


@dataclass(frozen=True, slots=True)
class _Names:
    """What the members of a log are called."""

    prompt: str
    """Length of the prompt."""
    output: str
    """Length of the answer."""
    arrivals: tuple[str, ...]
    """When it came: the first of these that the first line has."""
    first_token: str
    """When it had its first token."""
    last_token: str
    """When it had its last token."""
    least_output: int
    """0 where the log also has requests without an answer."""
    like: str
    """A line."""


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
    """Whether a line with these members is one of such a log."""
    return any({names.prompt, names.arrivals[-1]} <= members.keys() for names in (_VLLM, _OURS))


def read_request_log(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests as the engine queued them, or as they arrived where the log does not say."""
    for _, _, _, row in _lines(path):
        yield row if row.output_tokens else None


def read_measured(path: Path) -> list[RequestRecord]:
    """The answered requests of a log with their times, by arrival; the first arrives at 0.

    They have the ids of ``to_requests``. Raises ConfigError for a log without times, and for one without
    requests.
    """
    answered = (line for line in _lines(path) if line[3].output_tokens)
    lines = sorted(answered, key=lambda line: line[3].arrival_ns)
    if not lines:
        raise ConfigError(f"{path}: no request was answered; expected lines like {_VLLM.like}")
    begin_ns = lines[0][3].arrival_ns
    records = []
    for request_id, (line, record, names, row) in zip(
        own_ids([row for _, _, _, row in lines]), lines, strict=True
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
    """Number, members and names of every line, and its request."""
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
