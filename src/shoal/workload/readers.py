"""Reading of traces: the table of formats, detection of a file's format, ``load_trace``."""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core import ConfigError
from shoal.workload import azure, bailian, burstgpt, functions
from shoal.workload.conversations import CHARACTERS_PER_TOKEN, TURN_COLUMNS, read_sharegpt, read_turns
from shoal.workload.hashed_lines import CHAT, PARENT
from shoal.workload.length_tables import (
    ARRIVALS,
    arrival_column,
    lengths_columns,
    read_lengths,
    read_timed_lengths,
    unknown_time_column,
)
from shoal.workload.lines import Reader, ReadOptions, header_of, open_text
from shoal.workload.mooncake import read_mooncake
from shoal.workload.request_logs import is_request_log, read_request_log
from shoal.workload.rows import LARGEST_REQUESTS, TraceRow, sort_by_arrival
from shoal.workload.servegen import is_servegen, read_servegen


@dataclass(frozen=True, slots=True)
class TraceFormat:
    about: str
    """Description for lists and errors."""
    read: Reader
    timed: bool = True
    """Whether it has arrival times."""
    sized: bool = True
    """Whether it has lengths."""


FORMATS: Mapping[str, TraceFormat] = {
    "azure": TraceFormat("CSV TIMESTAMP,ContextTokens,GeneratedTokens", azure.read_azure),
    "mooncake": TraceFormat(
        "JSON lines with timestamp, input_length, output_length, hash_ids", read_mooncake
    ),
    "bailian": TraceFormat(
        "JSON lines with chat_id, timestamp, input_length, output_length, hash_ids", bailian.read_bailian
    ),
    "burstgpt": TraceFormat(
        "CSV Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", burstgpt.read_burstgpt
    ),
    "servegen": TraceFormat("folder of chunk-N-trace.csv and chunk-N-dataset.json", read_servegen),
    "maf-counts": TraceFormat(
        "CSV HashOwner,HashApp,HashFunction,Trigger,1,2,3,...", functions.read_counts, sized=False
    ),
    "maf-invocations": TraceFormat(
        "CSV app,func,end_timestamp,duration", functions.read_invocations, sized=False
    ),
    "sharegpt": TraceFormat(
        "JSON list of conversations with from and value, or role and content", read_sharegpt, timed=False
    ),
    "turns": TraceFormat("CSV conv,turn,role,tokens", read_turns, timed=False),
    "timed-lengths": TraceFormat("CSV prompt_tokens,output_tokens,arrival_s, or Vidur's", read_timed_lengths),
    "lengths": TraceFormat("CSV prompt_tokens,output_tokens", read_lengths, timed=False),
    "requests": TraceFormat(
        "JSON lines with input_toks, output_toks, arrival_time, or our own requests.jsonl", read_request_log
    ),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """The contents of a trace."""

    rows: list[TraceRow]
    """By arrival."""
    format: str
    """A name in ``FORMATS``; "empty" for an empty file."""
    timed: bool = True
    """Whether the rows have arrival times; otherwise these are 0."""
    sized: bool = True
    """Whether the rows have lengths; otherwise these are 0."""
    skipped: int = 0
    """Requests that are not in ``rows``, because they failed or are empty."""
    note: str = ""
    """Limitations of the rows, for a report; may be ""."""


def read_trace(path: Path | str, format: str | None = None, *, seed: int = 0) -> list[TraceRow]:
    """The rows of ``load_trace``."""
    return load_trace(path, format, seed=seed).rows


def load_trace(
    path: Path | str,
    format: str | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    count_tokens: Callable[[str], int] | None = None,
    from_zero: bool = True,
) -> Trace:
    """Read a trace in one pass, line by line.

    format: a name in FORMATS; None: guessed from the content. limit: maximum number of requests. seed: for
    formats with distributions (ServeGen, MAF's counts). count_tokens: length of a text, for ShareGPT.
    from_zero: shift times so that the first request arrives at 0.

    Raises ConfigError with file and line if the file is not such a trace.
    """
    path = Path(path)
    chosen = guess_format(path) if format is None else format
    if chosen is None:
        return Trace([], "empty")
    if chosen not in FORMATS:
        raise ConfigError(f"unknown trace format {chosen!r}; there are {', '.join(FORMATS)}")
    kind = FORMATS[chosen]
    if path.is_dir() != (kind.read is read_servegen):
        found = "a folder" if path.is_dir() else "no folder"
        raise ConfigError(f"{path}: is {found}; the format {chosen} is {kind.about}")
    rows, skipped = _read_rows(kind.read(path, ReadOptions(seed, count_tokens)), limit)
    if len(rows) > LARGEST_REQUESTS:
        raise ConfigError(
            f"{path}: more than {LARGEST_REQUESTS:,} requests; ask for the first so many of them (requests: "
            "100000, or --requests 100000)"
        )
    notes = _notes(rows, skipped)
    if kind.read is read_sharegpt and count_tokens is None:
        notes.append(f"no tokenizer was given: lengths are characters / {CHARACTERS_PER_TOKEN}")
    return Trace(
        sort_by_arrival(rows, from_zero=from_zero), chosen, kind.timed, kind.sized, skipped, "; ".join(notes)
    )


def _notes(rows: Sequence[TraceRow], skipped: int) -> list[str]:
    """Notes on skipped requests and missing hashes."""
    words = "request skipped, which" if skipped == 1 else "requests skipped, which"
    notes = [f"{skipped:,} {words} failed or had nothing to ask or answer"] if skipped else []
    unshared = sum(0 < len(row.hashes) < row.prompt_tokens // row.hash_tokens for row in rows)
    if unshared:
        notes.append(f"prompts whose end has no hashes, and is taken to share nothing: {unshared:,}")
    return notes


def _read_rows(found: Iterator[TraceRow | None], limit: int | None) -> tuple[list[TraceRow], int]:
    """The first ``limit`` requests, and the number of skipped ones among them."""
    rows: list[TraceRow] = []
    skipped = 0
    for row in found if limit is None or limit > 0 else ():
        if row is None:
            skipped += 1
            continue
        rows.append(row)
        if len(rows) == limit or len(rows) > LARGEST_REQUESTS:
            break
    return rows, skipped


def guess_format(path: Path) -> str | None:
    """The format of a trace by its first line; None for an empty file. Raises ConfigError if unknown."""
    if path.is_dir():
        if is_servegen(path):
            return "servegen"
        raise _unknown(path, "a folder without chunk-N-trace.csv")
    with open_text(path) as file:
        head = next((line.strip() for line in file if line.strip()), "")
    if not head:
        return None
    if head.startswith("["):
        return "sharegpt"
    if "\ufffd" in head or "\0" in head:
        raise _unknown(path, "it is not UTF-8 text")
    found = _by_members(head) if head.startswith("{") else _by_columns(path, header_of(head))
    if found is None:
        raise _unknown(path, f"its first line is {head[:80]!r}")
    return found


def _by_members(head: str) -> str | None:
    try:
        members = json.loads(head)
    except (ValueError, RecursionError):
        return _hashed(head) if "input_length" in head else "requests" if "input_toks" in head else None
    return _hashed(members) if "input_length" in members else "requests" if is_request_log(members) else None


def _hashed(members: Container[str]) -> str:
    return "bailian" if CHAT in members or PARENT in members else "mooncake"


def _by_columns(path: Path, header: list[str]) -> str | None:
    names = set(header)
    for required, name in (
        (azure.COLUMNS, "azure"),
        (burstgpt.COLUMNS, "burstgpt"),
        (functions.INVOCATION_COLUMNS, "maf-invocations"),
        (functions.COUNT_COLUMNS, "maf-counts"),
        (TURN_COLUMNS, "turns"),
    ):
        if names.issuperset(required):
            return name
    if lengths_columns(header) is None:
        return None
    if arrival_column(header) is not None:
        return "timed-lengths"
    if (column := unknown_time_column(header)) is not None:
        raise ConfigError(
            f"{path}: the column {column!r} seems to say when requests come, but not in which unit; call it "
            f"one of {', '.join(ARRIVALS)}, or give the format lengths, which leaves times out"
        )
    return "lengths"


def _unknown(path: Path, why: str) -> ConfigError:
    formats = "; ".join(f"{name}: {kind.about}" for name, kind in FORMATS.items())
    return ConfigError(f"{path}: the format is not known ({why}). Known formats are {formats}")
