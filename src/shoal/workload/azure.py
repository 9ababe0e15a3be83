"""Trace format: Azure's LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024), CSV."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from shoal.workload.lines import ReadOptions, csv_columns, line_error, parse_int
from shoal.workload.rows import TraceRow

COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
_EPOCH = datetime(1970, 1, 1)
_SECONDS = len("2023-11-16 18:17:03")


def read_azure(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with times since 1970, to the nanosecond."""
    for line, (time, prompt, output) in csv_columns(path, COLUMNS):
        yield TraceRow(
            _nanoseconds(time, path, line),
            parse_int(prompt, "ContextTokens", path, line),
            parse_int(output, "GeneratedTokens", path, line),
        )


def _nanoseconds(text: str, path: Path, line: int) -> int:
    # fromisoformat keeps six digits of the fraction, and the trace has seven, so the fraction is parsed here.
    text = text.strip().removesuffix("Z").removesuffix("+00:00")
    fraction = text[_SECONDS:].removeprefix(".")
    try:
        if not text.isascii():
            raise ValueError
        since = datetime.fromisoformat(text[:_SECONDS]) - _EPOCH
        if len(text) < _SECONDS or len(fraction) > 9 or not (fraction.isdecimal() or len(text) == _SECONDS):
            raise ValueError
        return (since.days * 86_400 + since.seconds) * 10**9 + int(fraction.ljust(9, "0"))
    except (ValueError, TypeError):
        expected = "a time like 2023-11-16 18:17:03.9799600, in UTC"
        raise line_error(path, line, f"TIMESTAMP is {text[:80]!r}", expected) from None
