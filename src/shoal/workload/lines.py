"""Parsing of trace files: CSV and JSON lines, numbers, and errors with file and line."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from shoal.core import ConfigError
from shoal.workload.rows import LARGEST_S, TraceRow

LARGEST_LENGTH = 10**9
LARGEST_COUNT = 10**6
"""Maximum requests of one client in one window or minute, in traces with counts or rates."""
_NOT_UTF8 = (
    (b"\x1f\x8b", "is compressed with gzip; unpack it first (gunzip)"),
    (b"PK\x03\x04", "is a zip archive; unpack it first (unzip)"),
    (b"\xff\xfe", "is UTF-16, not UTF-8; convert it first (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "is UTF-16, not UTF-8; convert it first (iconv -f UTF-16 -t UTF-8)"),
)
"""First bytes of files that are not UTF-8 text, and hints for the error."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of readers."""

    seed: int = 0
    """For formats with distributions or counts instead of requests."""
    count_tokens: Callable[[str], int] | None = None
    """Length of a text in tokens; None: one token per four characters."""


Reader = Callable[[Path, ReadOptions], Iterator[TraceRow | None]]
"""Yields the requests of a file in its order; None for a skipped request."""


def line_error(path: Path, line: int, wrong: str, expected: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {wrong}; expected {expected}")


def open_text(path: Path) -> TextIO:
    """Open a trace file for reading; invalid UTF-8 becomes U+FFFD, and so an error in its line.

    Raises ConfigError for a file that cannot be read, or that is compressed or UTF-16.
    """
    try:
        file = path.open("rb")
        head = file.peek(4)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    for magic, what in _NOT_UTF8:
        if head.startswith(magic):
            file.close()
            raise ConfigError(f"{path}: {what}")
    return TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")


def header_of(line: str) -> list[str]:
    """Column names in the first line of a CSV file: lower case, stripped."""
    return [name.strip().strip('"').strip().lower() for name in line.split(",")]


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every non-blank line; raises ConfigError for broken quotes."""
    with open_text(path) as file:
        reader = csv.reader(file, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise line_error(
                path, reader.line_num, f"no CSV ({error})", "cells separated by commas"
            ) from None


def csv_columns(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of the named columns; "" for a missing optional column.

    Column names are compared in lower case. Raises ConfigError for a missing required column, a duplicate
    column, or a line with more or fewer cells than the header.
    """
    lines = csv_lines(path)
    number, header = next(lines, (0, list(required)))
    names = header_of(",".join(header))
    missing = [name for name in required if name not in names]
    if missing:
        raise line_error(path, number, f"no column {', '.join(missing)}", f"columns {','.join(required)}")
    twice = [name for name in (*required, *optional) if names.count(name) > 1]
    if twice:
        raise line_error(path, number, f"column {', '.join(twice)} more than once", "one of each")
    indices = [names.index(name) if name in names else -1 for name in (*required, *optional)]
    for line, cells in lines:
        if len(cells) != len(names):
            raise line_error(path, line, f"{len(cells)} columns", f"{len(names)}: {','.join(names)}")
        yield line, [cells[index] if index >= 0 else "" for index in indices]


def json_lines(path: Path, like: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every non-blank line; like: an example, for errors."""
    with open_text(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise line_error(path, number, f"not JSON ({error})", f"an object like {like}") from None
            if not isinstance(record, dict):
                raise line_error(path, number, f"a JSON {type(record).__name__}", f"an object like {like}")
            yield number, record


def get_member(record: dict[str, Any], name: str, path: Path, line: int, like: str) -> Any:
    """A required member of a line."""
    if name not in record:
        raise line_error(path, line, f"no {name!r}", f"an object like {like}")
    return record[name]


def parse_int(
    value: object, name: str, path: Path, line: int, least: int = 1, most: int = LARGEST_LENGTH
) -> int:
    """A length or count from ``least`` to ``most``; raises ConfigError otherwise."""
    number = _as_int(value)
    if number is None or not least <= number <= most:
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        limits = f"a whole number from {least} to {most}"
        raise line_error(path, line, f"{name} is {str(shown)[:80]!r}", limits)
    return number


def _as_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or _python_only(value):
        return None
    try:
        return int(value) if isinstance(value, int | str) else _int_of_float(value)
    except ValueError:
        pass
    try:
        return _int_of_float(float(value))
    except ValueError:
        return None


def _python_only(value: int | float | str) -> bool:
    """Whether Python reads this as a number, but other programs do not: ``3_74``, digits of other scripts."""
    return isinstance(value, str) and ("_" in value or not value.isascii())


def _int_of_float(value: float) -> int | None:
    return int(value) if math.isfinite(value) and value.is_integer() else None


def parse_float(
    value: object, name: str, path: Path, line: int, least: float = -LARGEST_S, most: float = LARGEST_S
) -> float:
    """A number from ``least`` to ``most``; raises ConfigError otherwise."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or _python_only(value):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        limits = f"a number from {least:g} to {most:g}"
        raise line_error(path, line, f"{name} is {str(value)[:80]!r}", limits)
    return number


def parse_ns(value: object, name: str, path: Path, line: int) -> int:
    """Seconds as nanoseconds, at most a hundred years; raises ConfigError otherwise."""
    return round(parse_float(value, name, path, line) * 1e9)
