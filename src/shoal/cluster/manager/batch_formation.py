"""Formation of batches: which waiting requests go to an engine together, and when (SCLS, section 4).

The waiting requests of a service are SCLS's pool. A batch is of one service, since it is one model's step;
each service has its interval. Batches are numbered in the order in which they are dispatched, and engines run
them in that order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.batches import FormingContext, MemoryByBytes, PooledRequest, RequestBatch, batch_former
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.engine_load import BatchShape, EngineLoad
from shoal.cluster.manager.events import Submitted
from shoal.cluster.manager.state import ManagedCall

FORMED_AT_ONCE = 256
"""Requests that a former divides at once, those that have waited longest first: the time that SCLS's takes
grows with their square."""


@dataclass(slots=True)
class _Means:
    """Sums over all requests of a service so far, for the units of goals and lengths."""

    predicted: int = 0
    requests: int = 0
    goal_s: float = 0.0
    with_goal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """A batch without an engine."""

    calls: Sequence[ManagedCall]
    engines: Sequence[EngineLoad]
    """Those that are open to all of its requests."""
    batch: RequestBatch
    shape: BatchShape


class BatchFormation:
    """Forms batches; its owner dispatches them. ``open_engines``: of a waiting request."""

    def __init__(
        self, options: BatchingOptions, open_engines: Callable[[ManagedCall], Sequence[EngineLoad]]
    ) -> None:
        self.options = options
        self._former = batch_former(options.former)
        self._open_engines = open_engines
        self._means: dict[str, _Means] = defaultdict(_Means)
        self._formed_ns: dict[str, int] = {}
        self._num_formed = 0

    def pooled(self, event: Submitted, number: int, expected: int, now_ns: int) -> PooledRequest:
        """What formers see of a new request. expected: its output tokens, if none are predicted."""
        predicted = min(event.predicted_tokens or expected, event.most_tokens)
        means = self._means[event.service]
        means.requests += 1
        means.predicted += predicted
        if event.goal_s is not None:
            means.with_goal += 1
            means.goal_s += event.goal_s
        return PooledRequest(
            id=event.request,
            tokens=event.prompt_tokens,
            remaining=event.most_tokens,
            predicted=predicted,
            slo_s=event.goal_s,
            arrival_ns=now_ns,
            number=number,
        )

    def next_number(self) -> int:
        """The number of the next batch."""
        self._num_formed += 1
        return self._num_formed

    def form(
        self, service: str, waiting: Iterable[ManagedCall], engines: Sequence[EngineLoad], now_ns: int
    ) -> Iterator[Formed]:
        """The batches of a service that are due, in the order in which they get engines.

        waiting: the service's waiting requests, read at once if batches are due. engines: those that serve
        it, at least one; the caller adds a batch to one of them before it takes the next.
        """
        if self.options.interval_s is not None:
            if self._is_due(service, engines, now_ns):
                yield from self._batches(service, waiting, engines)
                self._formed_ns[service] = now_ns
            return
        idle = [load for load in engines if not load.requests(service)]
        if not idle:
            return
        for formed in self._batches(service, waiting, idle):
            now_idle = [load for load in formed.engines if not load.requests(service)]
            if now_idle:
                yield Formed(calls=formed.calls, engines=now_idle, batch=formed.batch, shape=formed.shape)

    def _is_due(self, service: str, engines: Sequence[EngineLoad], now_ns: int) -> bool:
        """Whether the interval is over, which follows the present loads: estimates are often too long."""
        assert self.options.interval_s is not None
        least_ns = min(load.remaining_ns for load in engines)
        interval_ns = max(self.options.load_factor * least_ns, self.options.interval_s * 1e9)
        return service not in self._formed_ns or now_ns >= self._formed_ns[service] + interval_ns

    def _batches(
        self, service: str, waiting: Iterable[ManagedCall], engines: Sequence[EngineLoad]
    ) -> list[Formed]:
        """All waiting requests in batches, as far as engines are open to them.

        Formers see them in the order in which they began to wait, so that a request comes back behind others.
        """
        names = {load.name for load in engines}
        # Requests share a batch only if the same engines are open to them; one of several choices does not.
        groups: dict[tuple[tuple[str, ...], object], list[ManagedCall]] = defaultdict(list)
        by_wait = sorted(waiting, key=lambda call: (call.waiting_since_ns, call.number))
        for place, call in enumerate(by_wait):
            opened = tuple(load.name for load in self._open_engines(call) if load.name in names)
            if opened:
                own = call.id if call.submitted.choices > 1 else place // FORMED_AT_ONCE
                groups[opened, own].append(call)
        formed = []
        for (opened, _), calls in groups.items():
            loads = [load for load in engines if load.name in opened]
            context = self._context(service, loads)
            by_id = {call.id: call for call in calls}
            for batch in self._former.form([_pooled(call) for call in calls], context):
                members = [by_id[request.id] for request in batch.requests]
                rows = sum(call.submitted.choices for call in members)
                shape = BatchShape(rows, batch.input_tokens, batch.iterations)
                formed.append(Formed(calls=members, engines=loads, batch=batch, shape=shape))
        if self.options.longest_first:
            formed.sort(key=lambda each: -each.batch.estimate_s)
        return formed

    def _context(self, service: str, engines: Sequence[EngineLoad]) -> FormingContext:
        options, means = self.options, self._means[service]
        tokens = min((load.kv_tokens[service] for load in engines if service in load.kv_tokens), default=0)
        memory = MemoryByBytes(token_bytes=1, available_bytes=tokens or 1 << 60, zeta=options.memory_share)
        return FormingContext(
            time=engines[0].serving_time(service),
            memory=memory,
            slice_tokens=options.slice_tokens,
            max_batch=options.max_batch,
            trust_predictions=options.trust_predictions,
            mean_slo_s=means.goal_s / means.with_goal if means.with_goal else 1.0,
            mean_predicted=means.predicted / means.requests if means.requests else 1.0,
        )


def _pooled(call: ManagedCall) -> PooledRequest:
    assert call.pooled is not None
    return call.pooled
