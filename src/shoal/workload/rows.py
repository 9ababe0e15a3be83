"""One request of a trace, before it belongs to a service."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MOONCAKE_BLOCK = 512
"""Tokens that one hash of Mooncake's format covers."""
LARGEST_S = 100 * 365.25 * 86_400
"""A hundred years, in seconds: the latest arrival. Nanoseconds overflow 64 bits after 292 years."""
LARGEST_REQUESTS = 20_000_000
"""Most requests of one workload: they are held in memory, at some hundred bytes each."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """When a request came, how long its prompt and its answer were, and what its prompt shares."""

    arrival_ns: int
    """Arrival time on the trace's clock."""
    prompt_tokens: int
    """Length of the prompt; 0 where the trace has arrivals only."""
    output_tokens: int
    """Length of the answer; 0 where the trace has arrivals only."""
    client: str | None = None
    """Who sent it, where the trace says so."""
    hashes: tuple[int, ...] = ()
    """One hash for each ``hash_tokens`` tokens of the prompt, from its beginning. The last may cover fewer
    tokens, and the end of the prompt may have none. Prompts with equal leading hashes begin alike."""
    hash_tokens: int = MOONCAKE_BLOCK
    """Tokens that one hash covers."""
    request_id: str | None = None
    """What the trace calls it."""
    service: str | None = None
    """Which service it was for, where the trace says so."""


def own_ids(rows: Sequence[TraceRow], prefix: str = "r") -> list[str]:
    """An id for each row: its own, if all have one that no other has, else ``prefix`` and its number."""
    ids = [row.request_id for row in rows if row.request_id is not None]
    return ids if len(set(ids)) == len(rows) else [f"{prefix}{number}" for number in range(len(rows))]


def in_order(rows: Iterable[TraceRow], *, from_zero: bool = True) -> list[TraceRow]:
    """The rows by arrival, ties in their old order; shifted so that the first is at 0."""
    ordered = sorted(rows, key=lambda row: row.arrival_ns)
    start = ordered[0].arrival_ns if ordered and from_zero else 0
    return [replace(row, arrival_ns=row.arrival_ns - start) for row in ordered] if start else ordered
