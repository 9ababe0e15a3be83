"""What an engine has to do, as far as that follows from the requests that were sent to it."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from shoal.cluster.manager.events import ServiceSpeed, Submitted
from shoal.forecast import Demand

MILLION = 1_000_000
INDEXED_BLOCKS = 65_536
"""Blocks of prompts that are remembered of each engine: those that were sent last."""

_UNKNOWN = ServiceSpeed(prefill_s=1e-3, decode_s=1e-2)


class Newcomer(NamedTuple):
    """A request that needs an engine."""

    call: Submitted
    """As it was submitted."""
    tokens: int
    """Output tokens that are expected of each choice."""
    turn: int
    """Requests of its service that were dispatched before."""
    now_ns: int
    """The present time."""


class Assigned(NamedTuple):
    """A request that the engine has, or is about to get."""

    call: Submitted
    """As it was submitted."""
    tokens: int
    """Output tokens that are expected of each choice."""
    cost_ns: int
    """What it adds to ``remaining_ns``."""
    share: int
    """What it adds to ``filled``."""
    since_ns: int
    """When it was sent."""
    turn: int
    """As in ``Newcomer``: where two engines have it, it was sent to that with the higher turn last."""


class EngineLoad:
    """One engine's requests and their sums, which are kept up to date so that nobody needs to scan.

    indexes_prefixes: whether to remember the prompts that were sent.
    """

    def __init__(self, name: str, *, indexes_prefixes: bool = False) -> None:
        self.name = name
        """Of the engine."""
        self.unfinished = 0
        """Choices of the requests that it has."""
        self.remaining_ns = 0
        """Sum of their estimated times. Each is what the request would take alone, so work that is done
        concurrently is overstated; it counts in full until the request has ended."""
        self.filled = 0
        """Sum of what they are expected to hold in the end, in millionths of its memory for KV; may be more
        than all of that, as some wait."""
        self.kv_tokens: dict[str, int] = {}
        """Tokens that fill its memory for KV, by service."""
        self.changes = 0
        """How often a request came or went."""
        self._speeds: dict[str, ServiceSpeed] = {}
        self._assigned: dict[str, Assigned] = {}
        # In the order in which they were sent last. The values mean nothing.
        self._blocks: dict[int, None] | None = {} if indexes_prefixes else None

    def begin(self, speeds: Mapping[str, ServiceSpeed]) -> None:
        """The engine starts with nothing, and computes so fast."""
        self._speeds = dict(speeds)
        self.unfinished = self.remaining_ns = self.filled = 0
        self.changes += 1
        self._assigned.clear()
        if self._blocks:
            self._blocks.clear()

    @property
    def assigned(self) -> Mapping[str, Assigned]:
        """The requests by id."""
        return self._assigned

    def speed(self, service: str) -> ServiceSpeed:
        """How fast the engine computes a service."""
        return self._speeds.get(service, _UNKNOWN)

    def learn(self, service: str, speed: ServiceSpeed) -> None:
        """The engine computes another service, so fast."""
        self._speeds[service] = speed

    def cost_ns(self, newcomer: Newcomer) -> int:
        """How long the engine takes for a request that runs alone."""
        call, tokens = newcomer.call, newcomer.tokens
        speed = self._speeds.get(call.service, _UNKNOWN)
        return int((speed.prefill_s * call.prompt_tokens + speed.decode_s * (tokens * call.choices)) * 1e9)

    def share(self, newcomer: Newcomer) -> int:
        """Millionths of its memory that a request is expected to hold in the end; 0 where nothing is known.

        The choices of a request share the KV of its prompt.
        """
        call = newcomer.call
        capacity = self.kv_tokens.get(call.service)
        tokens = call.prompt_tokens + newcomer.tokens * call.choices
        return tokens * MILLION // capacity if capacity else 0

    def pressure(self, newcomer: Newcomer) -> tuple[int, int]:
        """How loaded it is with a request: first by how much its memory is too small, then by its time."""
        too_small = max(MILLION, self.filled + self.share(newcomer))
        return too_small, self.remaining_ns + self.cost_ns(newcomer)

    def add(self, newcomer: Newcomer) -> None:
        """A request is sent to the engine."""
        call = newcomer.call
        cost_ns, share = self.cost_ns(newcomer), self.share(newcomer)
        self.changes += 1
        self._assigned[call.request] = Assigned(
            call, newcomer.tokens, cost_ns, share, newcomer.now_ns, newcomer.turn
        )
        self.unfinished += call.choices
        self.remaining_ns += cost_ns
        self.filled += share
        if self._blocks is not None:
            self._index(self._blocks, call.prefix)

    def remove(self, request: str) -> None:
        """The engine does not have the request any more."""
        self.changes += 1
        gone = self._assigned.pop(request)
        self.unfinished -= gone.call.choices
        self.remaining_ns -= gone.cost_ns
        self.filled -= gone.share

    def cached_blocks(self, prefix: Sequence[int]) -> int:
        """Leading blocks of a prompt that were sent to the engine and so are probably in its cache."""
        blocks = self._blocks or {}
        return next((at for at, block in enumerate(prefix) if block not in blocks), len(prefix))

    def peak_share(self, newcomer: Newcomer) -> float:
        """The most KV that its requests and the newcomer will hold at once, as a share of its memory.

        In tokens where its memory is not known.

        Services do not advance together, so each one's own peak counts in full. How far a request is follows
        from the time since it was sent, at the speed of a request that runs alone.
        """
        rows: dict[str, list[tuple[int, int]]] = {}
        everyone = [
            *self._assigned.values(),
            Assigned(newcomer.call, newcomer.tokens, 0, 0, newcomer.now_ns, newcomer.turn),
        ]
        for assigned in everyone:
            made = self._generated(assigned, newcomer.now_ns)
            # The choices of one request share their prompt's KV.
            service_rows = rows.setdefault(assigned.call.service, [])
            service_rows.append((assigned.call.prompt_tokens + made, assigned.tokens - made))
            service_rows += [(max(1, made), assigned.tokens - made)] * (assigned.call.choices - 1)
        return sum(_peak(own) / (self.kv_tokens.get(service) or 1) for service, own in rows.items())

    def _generated(self, assigned: Assigned, now_ns: int) -> int:
        speed = self.speed(assigned.call.service)
        decoding_s = (now_ns - assigned.since_ns) / 1e9 - speed.prefill_s * assigned.call.prompt_tokens
        return max(0, min(int(decoding_s / max(speed.decode_s, 1e-9)), assigned.tokens - 1))

    @staticmethod
    def _index(blocks: dict[int, None], prefix: Sequence[int]) -> None:
        # The end of a prompt is forgotten before its beginning, without which it is worth nothing.
        for block in reversed(prefix):
            blocks.pop(block, None)
            blocks[block] = None
        for block in list(islice(blocks, max(0, len(blocks) - INDEXED_BLOCKS))):
            del blocks[block]


def _peak(rows: Sequence[tuple[int, int]]) -> int:
    """M* in tokens of requests with (tokens now, tokens to come)."""
    tokens, remaining = np.array(rows, dtype=np.int64).T
    return int(Demand(np.maximum(tokens, 1), 1).timeline(remaining[None, :]).peak()[0])
