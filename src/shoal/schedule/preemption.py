"""Making room: who gives up memory so that a running, a starved or a more urgent request can go on."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np

from shoal.kvcache import BlockPool
from shoal.schedule.admission import Admission
from shoal.schedule.batching import slice_blocks
from shoal.schedule.memory_forecast import MemoryForecast
from shoal.schedule.orders import Order
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable
from shoal.schedule.service_state import ServiceState
from shoal.schedule.victims import MemoryPressure, Victim


class _Forecasts(Mapping[str, MemoryForecast]):
    """Every service's forecast, made when somebody asks: most victims are chosen without."""

    def __init__(self, services: Mapping[str, ServiceState]) -> None:
        self._services = services
        self._made: dict[str, MemoryForecast] = {}

    def __getitem__(self, service: str) -> MemoryForecast:
        if service not in self._made:
            self._made[service] = self._services[service].forecast()
        return self._made[service]

    def __iter__(self) -> Iterator[str]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)


class Preemptor:
    """Chooses whom to preempt; called only while no plan is in flight."""

    def __init__(
        self, pool: BlockPool, store: RequestStore, order: Order, victim: Victim, admission: Admission
    ) -> None:
        self._pool = pool
        self._store = store
        self._services = store.services
        self._order = order
        self._victim = victim
        self._admission = admission

    def compact(self, service: str, blocks: int) -> bool:
        """Move blocks so that ``blocks`` more of a service can be allocated; whether that worked."""
        moves = self._pool.compact(service, blocks)
        if moves is None:
            return False
        self._store.compacted(moves)
        return True

    def preempt_one(self) -> None:
        """Take the memory of one running request, as the victim policy says; never the oldest admitted."""
        table = RequestTable(())
        for state in self._services.values():
            table = table.joined(state.running)
        candidates = table.take(table.seq_id.argsort()[1:])
        pressure = MemoryPressure(
            candidates, _Forecasts(self._services), self._pool.capacity, lambda: self._keys(candidates)
        )
        self._store.preempt(self._victim.choose(pressure))

    def _keys(self, candidates: RequestTable) -> FloatArray:
        """How urgent the order finds each of some running requests."""
        keys = np.zeros(len(candidates))
        for name, state in self._services.items():
            own = np.array([request.service == name for request in candidates.requests])
            if own.any():
                rows, _ = state.running.rows_of(candidates.seq_id[own])
                keys[own] = self._order.keys(state, state.running)[rows]
        return keys

    def num_running(self) -> int:
        """How many requests hold memory."""
        return sum([len(state.running) for state in self._services.values()])

    def preemptible(self, request: RequestState, *, starved: bool) -> list[RequestState]:
        """Running requests that must give way to ``request``, the least urgent last.

        Those that the order finds less urgent, never the oldest admitted. For a ``starved`` one everybody,
        but first those of its own service: one that has too much to do does not take it out on others.
        Under slices nobody gives way inside one.
        """
        own = self._order.keys(self._services[request.service], RequestTable([request]))[0]
        batches = [state.running for state in self._services.values() if len(state.running)]
        oldest = min((int(batch.seq_id[0]) for batch in batches), default=0)
        found: list[tuple[tuple[bool, float, int], RequestState]] = []
        for state in self._services.values():
            batch = state.running
            if not len(batch):
                continue
            keys = self._order.keys(state, batch)
            weaker = (
                np.ones(len(batch), dtype=np.bool_) if starved else (keys > own) & (batch.seq_id != oldest)
            )
            if self._admission.slice_tokens is not None:
                weaker &= batch.num_tokens_with_in_flight >= batch.slice_end
            same = starved and state.service == request.service
            for row in weaker.nonzero()[0].tolist():
                found.append(((same, float(keys[row]), int(batch.seq_id[row])), batch.requests[row]))
        found.sort(key=itemgetter(0))
        return [other for _, other in found]

    def would_fit(self, request: RequestState, gone: Sequence[RequestState], *, always: bool) -> bool:
        """Whether ``request`` could be admitted if all of ``gone`` gave up their memory.

        always: whatever the admission says, if there is room for its known tokens.
        """
        if len(gone) == self.num_running():
            return True
        if self._admission.slice_tokens is not None and not self._slice_fits(request, gone):
            return False
        forecasts = {
            name: state.forecast_without(self._rows_of(gone, state)) for name, state in self._services.items()
        }
        own = forecasts.pop(request.service)
        candidate = RequestTable([request])
        if always:
            joined = own.plus(candidate, own.shared)
            others = sum(forecast.footprint for forecast in forecasts.values())
            return joined.footprint + others <= self._pool.capacity
        others_running = list(forecasts.values())
        return self._admission.how_many_fit(own, candidate, others_running, self._pool.capacity) == 1

    def _rows_of(self, gone: Sequence[RequestState], state: ServiceState) -> IntArray:
        seq_ids = np.array(
            [request.seq_id for request in gone if request.service == state.service], dtype=np.int64
        )
        return state.running.rows_of(seq_ids)[0] if len(seq_ids) else seq_ids

    def _slice_fits(self, request: RequestState, gone: Sequence[RequestState]) -> bool:
        """Whether its first slice could be allocated if ``gone`` gave up what nobody else holds."""
        assert self._admission.slice_tokens is not None
        held = {name: self._pool.live_blocks(name) for name in self._services}
        for other in gone:
            held[other.service] -= len(other.block_ids) - other.num_shareable
        held[request.service] += slice_blocks(request, self._admission.slice_tokens, self._pool.block_size)
        return sum(self._pool.merged_demand(*item) for item in held.items()) <= self._pool.capacity
