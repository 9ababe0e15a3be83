"""The row of a trace (one request): arrival, lengths, hashes; ids and order of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MOONCAKE_BLOCK = 512
"""Tokens per hash in Mooncake's format."""
LARGEST_S = 100 * 365.25 * 86_400
"""A hundred years, in seconds: the latest arrival. Nanoseconds overflow 64 bits after 292 years."""
LARGEST_REQUESTS = 20_000_000
"""Maximum requests of one workload, which are in memory with some hundred bytes each."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_ns: int
    """On the trace's clock."""
    prompt_tokens: int
    """0 if the trace has only arrivals."""
    output_tokens: int
    """0 if the trace has only arrivals."""
    client: str | None = None
    """None if unknown."""
    hashes: tuple[int, ...] = ()
    """One hash for each ``hash_tokens`` tokens of the prompt, from its beginning. The last may cover fewer
    tokens, and the end of the prompt may have none. Prompts with equal leading hashes share a prefix."""
    hash_tokens: int = MOONCAKE_BLOCK
    """Tokens per hash."""
    request_id: str | None = None
    """None if the trace has no ids."""
    service: str | None = None
    """None if unknown."""


def request_ids(rows: Sequence[TraceRow], prefix: str = "r") -> list[str]:
    """An id for each row: its own if all are unique, else ``prefix`` and its number."""
    ids = [row.request_id for row in rows if row.request_id is not None]
    return ids if len(set(ids)) == len(rows) else [f"{prefix}{number}" for number in range(len(rows))]


def sort_by_arrival(rows: Iterable[TraceRow], *, from_zero: bool = True) -> list[TraceRow]:
    """The rows by arrival (a stable sort), shifted so that the first is at 0 if ``from_zero``."""
    ordered = sorted(rows, key=lambda row: row.arrival_ns)
    start = ordered[0].arrival_ns if ordered and from_zero else 0
    return [replace(row, arrival_ns=row.arrival_ns - start) for row in ordered] if start else ordered
