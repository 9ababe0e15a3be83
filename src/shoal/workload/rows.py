"""One request of a trace, before it belongs to a service."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOONCAKE_BLOCK = 512
"""Tokens that one hash of Mooncake's format covers."""
LARGEST_S = 100 * 365.25 * 86_400
"""A hundred years, in seconds: the latest that a request may come. Nanoseconds fill 64 bits after 292."""
LARGEST_REQUESTS = 20_000_000
"""Most requests of one workload: they are held in memory, at some hundred bytes each."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """When a request came, how long its prompt and its answer were, and what its prompt shares.

    arrival_ns: on the trace's clock. prompt_tokens, output_tokens: 0 where the trace has arrivals only.
    client: who sent it. hashes: one for each ``hash_tokens`` tokens of the prompt, from its beginning (the
    last may cover fewer, or the rest of the prompt may have none); two prompts are the same for as long as
    their hashes are.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    client: str | None = None
    hashes: tuple[int, ...] = ()
    hash_tokens: int = MOONCAKE_BLOCK


def in_order(rows: Iterable[TraceRow], *, from_zero: bool = True) -> list[TraceRow]:
    """The rows by arrival, those of one instant as they were; shifted so that the first is at 0."""
    ordered = sorted(rows, key=lambda row: row.arrival_ns)
    start = ordered[0].arrival_ns if ordered and from_zero else 0
    return [replace(row, arrival_ns=row.arrival_ns - start) for row in ordered] if start else ordered
