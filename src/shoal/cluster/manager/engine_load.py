"""Estimated load of an engine (time, memory, cached prefixes), from the requests that were sent to it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from shoal.cluster.manager.events import ServiceSpeed, Submitted
from shoal.engine.absent_weights import AbsentWeights
from shoal.forecast import Demand

MILLION = 1_000_000
INDEXED_BLOCKS = 65_536
"""Prompt blocks remembered per engine, the most recently sent ones."""

_UNKNOWN = ServiceSpeed(prefill_s=1e-3, decode_s=1e-2)
_FAILING_NS = 3_600_000_000_000
"""Assumed time of a fetch that has failed again and again: more than any queue."""


class BatchShape(NamedTuple):
    """Size of a batch of requests that run together."""

    rows: int
    input_tokens: int
    """The longest input."""
    iterations: int
    """Output tokens of each row."""


class UnassignedRequest(NamedTuple):
    """A request that needs an engine."""

    call: Submitted
    tokens: int
    """Expected output tokens of each choice."""
    turn: int
    """Number of requests of its service dispatched before."""
    now_ns: int
    batch: BatchShape | None = None
    """The batch that it is part of; None: it runs alone."""


class AssignedRequest(NamedTuple):
    """A request that the engine has, or is about to get."""

    call: Submitted
    tokens: int
    """Expected output tokens of each choice."""
    cost_ns: int
    """Its part of ``remaining_ns``."""
    share: int
    """Its part of ``filled``."""
    since_ns: int
    turn: int
    """As in ``UnassignedRequest``. Of two engines with the request, the higher turn got it last."""


class EngineLoad:
    """One engine's requests and running sums over them.

    indexes_prefixes: whether to remember the prompts that were sent.
    """

    def __init__(self, name: str, *, indexes_prefixes: bool = False) -> None:
        self.name = name
        self.unfinished = 0
        """Unfinished choices."""
        self.remaining_ns = 0
        """Sum of the requests' estimated times, each in full until the request ends. Each is the time of the
        request alone, so concurrent work is overstated, or its part of the time of its batch."""
        self.filled = 0
        """Sum of the KV that the requests are expected to hold at their end, in millionths of the KV memory.
        May
        exceed a million, since some of them wait."""
        self.kv_tokens: dict[str, int] = {}
        """Tokens that fill its KV memory, by service."""
        self.changes = 0
        """Count of additions and removals."""
        self._speeds: dict[str, ServiceSpeed] = {}
        self._assigned: dict[str, AssignedRequest] = {}
        self._requests: Counter[str] = Counter()  # by service
        self._absent: tuple[AbsentWeights, ...] = ()
        # An ordered set, the most recently sent last.
        self._blocks: dict[int, None] | None = {} if indexes_prefixes else None

    def begin(self, speeds: Mapping[str, ServiceSpeed]) -> None:
        """The engine has started, without requests."""
        self._speeds = dict(speeds)
        self.unfinished = self.remaining_ns = self.filled = 0
        self.changes += 1
        self._assigned.clear()
        self._requests.clear()
        self._absent = ()
        if self._blocks:
            self._blocks.clear()

    @property
    def assigned(self) -> Mapping[str, AssignedRequest]:
        return self._assigned

    def speed(self, service: str) -> ServiceSpeed:
        return self._speeds.get(service, _UNKNOWN)

    def learn(self, service: str, speed: ServiceSpeed) -> None:
        """Set the speed of a service."""
        self._speeds[service] = speed

    def serving_time(self, service: str) -> "BatchTime":
        """The estimate of a batch's time on this engine."""
        return BatchTime(self._speeds.get(service, _UNKNOWN))

    def cost_ns(self, unassigned: UnassignedRequest) -> int:
        """Estimated time of a request that runs alone, or its part of the time of its batch."""
        call, tokens = unassigned.call, unassigned.tokens
        if (batch := unassigned.batch) is not None:
            return int(self.serving_time(call.service).serve(*batch) * 1e9) * call.choices // batch.rows
        speed = self._speeds.get(call.service, _UNKNOWN)
        return int((speed.prefill_s * call.prompt_tokens + speed.decode_s * (tokens * call.choices)) * 1e9)

    def share(self, unassigned: UnassignedRequest) -> int:
        """Expected KV of a request at its end, in millionths of the KV memory; 0: unknown.

        The choices of a request share the KV of its prompt.
        """
        call = unassigned.call
        capacity = self.kv_tokens.get(call.service)
        tokens = call.prompt_tokens + unassigned.tokens * call.choices
        return tokens * MILLION // capacity if capacity else 0

    def pressure(self, unassigned: UnassignedRequest) -> tuple[int, int]:
        """Its load with a request, as a sort key: excess over its memory, then estimated time."""
        too_small = max(MILLION, self.filled + self.share(unassigned))
        time_ns = self.remaining_ns + self.cost_ns(unassigned) + self.fetch_ns(unassigned.call.service)
        return too_small, time_ns

    def weights_moved(self, absent: tuple[AbsentWeights, ...]) -> None:
        """These weights are absent from its memory now, and no others."""
        self._absent = absent

    def fetch_ns(self, service: str) -> int:
        """Estimated time of the fetch that a new request of a service causes.

        0 if its weights are in memory, or come for another request. As there is one fetch at a time, those of
        other absent weights with requests come before it.
        """
        own = next((weights for weights in self._absent if service in weights.services), None)
        if own is None or self._is_wanted(own):
            return 0
        return _fetch_ns(own) + sum(_fetch_ns(each) for each in self._absent if self._is_wanted(each))

    def requests(self, service: str) -> int:
        """Number of its requests of a service."""
        return self._requests[service]

    def _is_wanted(self, weights: AbsentWeights) -> bool:
        """Whether it has requests for some weights."""
        return any(self._requests[service] for service in weights.services)

    def add(self, unassigned: UnassignedRequest) -> None:
        call = unassigned.call
        cost_ns, share = self.cost_ns(unassigned), self.share(unassigned)
        self.changes += 1
        self._assigned[call.request] = AssignedRequest(
            call, unassigned.tokens, cost_ns, share, unassigned.now_ns, unassigned.turn
        )
        self._requests[call.service] += 1
        self.unfinished += call.choices
        self.remaining_ns += cost_ns
        self.filled += share
        if self._blocks is not None:
            self._index(self._blocks, call.prefix)

    def remove(self, request: str) -> None:
        self.changes += 1
        gone = self._assigned.pop(request)
        self._requests[gone.call.service] -= 1
        self.unfinished -= gone.call.choices
        self.remaining_ns -= gone.cost_ns
        self.filled -= gone.share

    def cached_blocks(self, prefix: Sequence[int]) -> int:
        """Leading blocks of a prompt that are probably in its prefix cache, since they were sent to it."""
        blocks = self._blocks or {}
        return next((at for at, block in enumerate(prefix) if block not in blocks), len(prefix))

    def peak_share(self, unassigned: UnassignedRequest) -> float:
        """Forecast KV peak with the new request, as a share of its memory (in tokens if that is unknown).

        Services do not advance together, so the peaks of all services are added. The progress of a request
        follows from the time since it was sent, at the speed of a request that runs alone.
        """
        rows: dict[str, list[tuple[int, int]]] = {}
        requests = [
            *self._assigned.values(),
            AssignedRequest(unassigned.call, unassigned.tokens, 0, 0, unassigned.now_ns, unassigned.turn),
        ]
        for assigned in requests:
            made = self._generated(assigned, unassigned.now_ns)
            # The choices of one request share their prompt's KV.
            service_rows = rows.setdefault(assigned.call.service, [])
            service_rows.append((assigned.call.prompt_tokens + made, assigned.tokens - made))
            service_rows += [(max(1, made), assigned.tokens - made)] * (assigned.call.choices - 1)
        return sum(_peak(rows_) / (self.kv_tokens.get(service) or 1) for service, rows_ in rows.items())

    def _generated(self, assigned: AssignedRequest, now_ns: int) -> int:
        speed = self.speed(assigned.call.service)
        decoding_s = (now_ns - assigned.since_ns) / 1e9 - speed.prefill_s * assigned.call.prompt_tokens
        return max(0, min(int(decoding_s / max(speed.decode_s, 1e-9)), assigned.tokens - 1))

    @staticmethod
    def _index(blocks: dict[int, None], prefix: Sequence[int]) -> None:
        # The end of a prompt is forgotten before its beginning: it is useless alone.
        for block in reversed(prefix):
            blocks.pop(block, None)
            blocks[block] = None
        for block in list(islice(blocks, max(0, len(blocks) - INDEXED_BLOCKS))):
            del blocks[block]


class BatchTime(NamedTuple):
    """Serving time of a batch (SCLS, section 4.2) from the speed of a request that runs alone.

    Prompts are computed one after another. A further row costs a decode step what a prompt token costs: the
    weights are read once for all rows. What attention to longer contexts costs is left out.
    """

    speed: ServiceSpeed

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        """Seconds for ``sequences`` inputs of ``input_tokens`` and ``iterations`` output tokens of each."""
        speed = self.speed
        row_s = min(speed.prefill_s, speed.decode_s)
        step_s = speed.decode_s + (sequences - 1) * row_s
        return speed.prefill_s * input_tokens * sequences + (iterations - 1) * step_s


def _fetch_ns(weights: AbsentWeights) -> int:
    return _FAILING_NS if weights.failing else int(weights.fetch_s * 1e9)


def _peak(rows: Sequence[tuple[int, int]]) -> int:
    """M* in tokens; rows: (tokens now, tokens to come)."""
    tokens, remaining = np.array(rows, dtype=np.int64).T
    return int(Demand(np.maximum(tokens, 1), 1).timeline(remaining[None, :]).peak()[0])
