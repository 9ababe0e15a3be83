"""Trace formats: CSV tables of prompt and output lengths, with or without arrival times (also Vidur's)."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.core import ConfigError
from shoal.workload.lines import (
    ReadOptions,
    csv_columns,
    csv_lines,
    header_of,
    line_error,
    parse_float,
    parse_int,
)
from shoal.workload.rows import LARGEST_S, TraceRow

COLUMN_PAIRS = (
    ("prompt_tokens", "output_tokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_len", "output_len"),
    ("input_tokens", "output_tokens"),
)
ARRIVALS = {
    "arrival_s": 1.0,
    "arrived_at": 1.0,
    "arrival_time": 1.0,
    "arrival_time_s": 1.0,
    "arrival_ms": 1e-3,
    "arrival_time_ms": 1e-3,
}
"""Columns of arrival times, with their unit in seconds. Vidur has ``arrived_at``."""
_CLIENTS = ("client", "session_id")
_IDS = ("request_id", "req_id")
_TIMES = re.compile(
    r"arriv|timestamp|^(date)?time(_s|_ms|_us|_ns)?$|^date$|_at$|^(start|submit|sen[dt]|issue|queued)\w*"
)


def lengths_columns(header: Sequence[str]) -> tuple[str, str] | None:
    """The columns of prompt and output lengths in a header; None if there are none."""
    return next((pair for pair in COLUMN_PAIRS if set(pair) <= set(header)), None)


def arrival_column(header: Sequence[str]) -> str | None:
    """The column of arrival times in a header; None if there is none."""
    return next((name for name in ARRIVALS if name in header), None)


def unknown_time_column(header: Sequence[str]) -> str | None:
    """A column that seems to have times in an unknown unit; None if there is none."""
    return next((name for name in header if _TIMES.search(name)), None)


def read_lengths(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Lengths without times (0); lines with a length of 0 are skipped."""
    yield from read_timed_lengths(path, options, timed=False)


def read_timed_lengths(path: Path, options: ReadOptions, timed: bool = True) -> Iterator[TraceRow | None]:
    """Lengths with a column of ARRIVALS; clients, services and request ids are optional."""
    _, first = next(csv_lines(path), (0, [*COLUMN_PAIRS[0], next(iter(ARRIVALS))]))
    header = header_of(",".join(first))
    pair, arrival = lengths_columns(header), arrival_column(header)
    if pair is None:
        possible = " or ".join(",".join(pair) for pair in COLUMN_PAIRS)
        raise ConfigError(f"{path}:1: no columns of lengths; expected {possible}")
    if timed and arrival is None:
        raise line_error(path, 1, "no column of arrival times", f"one of {', '.join(ARRIVALS)}")
    optional = (*_CLIENTS, *_IDS, "service", *ARRIVALS)
    for line, (prompt, output, *more) in csv_columns(path, pair, optional):
        values = dict(zip(optional, more, strict=True))
        lengths = parse_int(prompt, pair[0], path, line, 0), parse_int(output, pair[1], path, line, 0)
        row = TraceRow(
            _arrival_ns(values[arrival], arrival, path, line) if timed and arrival else 0,
            *lengths,
            _first(values, _CLIENTS),
            request_id=_first(values, _IDS),
            service=values["service"] or None,
        )
        yield row if all(lengths) else None


def _arrival_ns(value: str, name: str, path: Path, line: int) -> int:
    unit_s = ARRIVALS[name]
    most = LARGEST_S / unit_s
    return round(parse_float(value, name, path, line, -most, most) * (unit_s * 1e9))


def _first(values: dict[str, str], names: Sequence[str]) -> str | None:
    return next((values[name] for name in names if values[name]), None)
