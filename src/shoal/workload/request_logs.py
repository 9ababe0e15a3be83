"""Logs of a vLLM benchmark: JSON lines with ``input_toks``, ``output_toks`` and ``arrival_time``."""

from collections.abc import Iterator
from pathlib import Path

from shoal.workload.lines import ReadOptions, get_member, json_lines, parse_int, parse_ns
from shoal.workload.rows import TraceRow

_LIKE = '{"input_toks": 2358, "output_toks": 531, "arrival_time": 1787267980.08}'


def read_request_log(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with times in seconds since 1970; other members are ignored."""
    for line, record in json_lines(path, _LIKE):
        time, prompt, output = (
            get_member(record, name, path, line, _LIKE)
            for name in ("arrival_time", "input_toks", "output_toks")
        )
        yield TraceRow(
            parse_ns(time, "arrival_time", path, line),
            parse_int(prompt, "input_toks", path, line),
            parse_int(output, "output_toks", path, line),
        )
