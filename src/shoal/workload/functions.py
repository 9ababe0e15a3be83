"""Trace formats: invocations of serverless functions (MAF: Microsoft Azure Functions, 2019 and 2021), CSV.

They have arrivals only. Papers on model serving use them as traffic of LLM services: functions are assigned
to services (``assign_clients``), and lengths are drawn from a distribution.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal.core import derive_seed
from shoal.workload.lines import (
    LARGEST_COUNT,
    ReadOptions,
    csv_columns,
    csv_lines,
    header_of,
    line_error,
    parse_float,
    parse_int,
    parse_ns,
)
from shoal.workload.rows import LARGEST_REQUESTS, LARGEST_S, TraceRow

INVOCATION_COLUMNS = ("app", "func", "end_timestamp", "duration")
COUNT_COLUMNS = ("hashowner", "hashapp", "hashfunction", "trigger")
_MINUTE_NS = 60 * 10**9
_LARGEST_MINUTE = int(LARGEST_S / 60)


def read_invocations(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """MAF 2021: one line per invocation, which arrived ``duration`` seconds before ``end_timestamp``."""
    for line, (app, function, end, duration) in csv_columns(path, INVOCATION_COLUMNS):
        lasted = parse_float(duration, "duration", path, line, least=0.0)
        arrival = parse_ns(end, "end_timestamp", path, line) - round(lasted * 1e9)
        yield TraceRow(arrival, 0, 0, f"{app}/{function}")


def read_counts(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """MAF 2019: one line per function with the number of invocations in every minute.

    Times within a minute are independent and uniform (as for a Poisson process with a given count); draws
    depend on seed, line and minute.
    """
    lines = csv_lines(path)
    number, header = next(lines, (0, list(COUNT_COLUMNS)))
    fixed = len(COUNT_COLUMNS)
    if tuple(header_of(",".join(header[:fixed]))) != COUNT_COLUMNS:
        raise line_error(path, number, "another header", "HashOwner,HashApp,HashFunction,Trigger,1,2,3,...")
    minutes = [
        parse_int(name, "a column of a minute", path, number, most=_LARGEST_MINUTE) - 1
        for name in header[fixed:]
    ]
    arrivals: list[tuple[int, str]] = []
    for line, cells in lines:
        if len(cells) != len(header):
            raise line_error(path, line, f"{len(cells)} columns", str(len(header)))
        client = "/".join(cells[1:3])
        for minute, cell in zip(minutes, cells[fixed:], strict=True):
            count = parse_int(cell, f"minute {minute + 1}", path, line, 0, LARGEST_COUNT)
            if len(arrivals) + count > LARGEST_REQUESTS:
                most = f"at most {LARGEST_REQUESTS:,}; keep fewer lines, or fewer minutes"
                raise line_error(path, line, f"more than {LARGEST_REQUESTS:,} invocations so far", most)
            if count:
                draw = np.random.default_rng(derive_seed(options.seed, line, minute))
                offsets = np.sort(draw.integers(0, _MINUTE_NS, count)).tolist()
                arrivals.extend((minute * _MINUTE_NS + offset, client) for offset in offsets)
    arrivals.sort(key=lambda arrival: arrival[0])
    for time, client in arrivals:
        yield TraceRow(time, 0, 0, client)
