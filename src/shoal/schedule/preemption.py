"""Making room: who gives up memory so that a running, a starved or a more urgent request can go on."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np

from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Rejection
from shoal.schedule.batching import next_slice_blocks, slice_blocks
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.plan_builder import InFlightStep
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.policies.victims import VICTIMS, MemoryPressure
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable
from shoal.schedule.service_state import ServiceState


def execution_s(state: ServiceState) -> float:
    """L: execution time of a service's mean request, alone where that is known."""
    traits = state.traits
    return max(traits.mean_s if traits.alone_s is None else traits.alone_s, 1e-9)


def is_worth_preempting(
    waiting: ServiceState,
    victims: Sequence[ServiceState],
    services: Iterable[ServiceState],
    cost_s: float,
) -> bool:
    """Whether a request gains more than ``victims`` lose, each in units of its service's execution time.

    Running requests end at a rate of N / L, so that W seconds pass until as many have ended as there are
    victims. So long the request waits, or else every victim, which is the first to come back and meanwhile
    has to be saved or computed again, in ``cost_s``: it is worth it where W / L of the one exceeds the sum of
    (W + cost) / L of the others. Ours, by Smith's rule: memory goes to whom it serves for the shortest time.
    """
    ends_per_s = sum([len(state.running) / execution_s(state) for state in services])
    wait_s = len(victims) / ends_per_s
    lost = sum([(wait_s + cost_s) / execution_s(state) for state in victims])
    return wait_s / execution_s(waiting) > lost


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


class WaitForInFlight(Exception):
    """Memory is short, and plans in flight may free some: wait for them before anybody is preempted."""


class Preemptor:
    """Makes room by compaction and preemption; raises WaitForInFlight where plans in flight must end first.

    When running requests need blocks and none is free, the pool is compacted, or requests are preempted until
    it fits; a request that needs blocks is itself a candidate. A request that waits preempts nobody, unless
    it may preempt those less urgent (not one whose goals are out of reach) or has starved. Where requests own
    slices, nobody is preempted inside one; if all holders of memory wait for a slice that none can get, one
    of them is preempted.

    Plans in flight may end requests, so they come first. A preempted request is thereby never part of one,
    and its blocks are freed at once.

    in_flight: those plans, as the scheduler knows them.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        options: SchedulerOptions,
        in_flight: Collection[InFlightStep],
    ) -> None:
        self._pool = pool
        self._store = store
        self._services = store.services
        self._order = options.order
        self._victim = VICTIMS[options.victim]()
        self._admission = options.admission
        self._mode = options.preempt_for_waiting
        self._max_batched_tokens = options.max_batched_tokens
        self._in_flight = in_flight

    def make_room(self, service: str, blocks: int) -> bool:
        """Free memory for running requests: in pieces that are there, or else somebody's. Always True."""
        self._require_drained()
        if not self._compact(service, blocks):
            self._preempt_one()
        return True

    def make_room_for(
        self, request: RequestState, rejection: Rejection, blocks: int, *, starved: bool
    ) -> bool:
        """Do something so that a rejected request may be admitted now; whether anything was done.

        blocks: of its service, needed in all. starved: it may preempt whom it must.
        """
        try:
            if rejection is Rejection.FRAGMENTED:
                self._require_drained()
                return self._compact(request.service, blocks)
            # Slots alone are no reason to preempt: whoever runs gets on, and ends sooner for it.
            wanted = rejection is Rejection.MEMORY and self._mode != "never" and not request.deprioritized
            if wanted or (starved and rejection in (Rejection.MEMORY, Rejection.SLOTS)):
                return self._preempt_for(request, starved=starved)
        except WaitForInFlight:
            request.rejected_epoch = -1  # so that a second look drains again, instead of passing it over
            raise
        return False

    def help_to_slice(self, request: RequestState) -> bool:
        """A starved holder of memory gets no slice: preempt another who is between slices, if any is."""
        if self._admission.slice_tokens is None:
            return False
        batch = self._services[request.service].running
        row = batch.row_of(request)
        others = [other for other in self._preemptible(request, starved=True) if other is not request]
        if not others or batch.num_tokens_with_in_flight[row] < batch.slice_end[row]:
            return False
        self._require_drained()
        others[-1].num_preempted_by_starvation += 1
        self._store.preempt(others[-1])
        return True

    def break_slice_deadlock(self) -> bool:
        """Where all holders of memory wait for a slice, help one to it or preempt one; whether so."""
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is None or self._in_flight or self._num_running() < 2:
            return False
        if any(np.count_nonzero(state.running.postponed) for state in self._services.values()):
            return False  # they go on, or wait for a slice, when they are ready
        for state in self._services.values():
            for blocks in next_slice_blocks(state.running, slice_tokens, self._pool.block_size):
                if self._compact(state.service, blocks):
                    return True
        self._preempt_one()
        return True

    def _require_drained(self) -> None:
        if self._in_flight:
            raise WaitForInFlight

    def _preempt_for(self, request: RequestState, *, starved: bool) -> bool:
        """Preempt those who must give way to ``request``, the least urgent first, if enough of them can."""
        preemptible = self._preemptible(request, starved=starved)
        if self._mode == "gain" and not starved:
            own_s = execution_s(self._services[request.service])
            preemptible = [
                other for other in preemptible if execution_s(self._services[other.service]) > own_s
            ]
        if not preemptible or not self._would_fit(request, preemptible, always=starved):
            return False
        few, enough = 0, len(preemptible)
        while enough - few > 1:
            half = (few + enough) // 2
            if self._would_fit(request, preemptible[-half:], always=starved):
                enough = half
            else:
                few = half
        victims = preemptible[-enough:]
        if self._mode == "gain" and not starved and not self._is_worth(request, victims):
            return False
        self._require_drained()
        for victim in victims:
            victim.num_preempted_by_starvation += starved
            self._store.preempt(victim)
        return True

    def _is_worth(self, request: RequestState, victims: Sequence[RequestState]) -> bool:
        """Whether a request that waits gains more than all of the victims lose."""
        states = [self._services[victim.service] for victim in victims]
        # With host memory one step that saves the KV and brings it back.
        lost_ns = max([max(state.recent_steps_ns, default=0) for state in states])
        if not self._store.swaps:  # As many as compute it again; by tokens, too, as chunks may be small.
            most = [int(state.running.num_computed.max()) for state in states]
            steps = -(-max(most) // self._max_batched_tokens)
            again = [state.prompt_token_ns() * tokens for state, tokens in zip(states, most, strict=True)]
            lost_ns = max(steps * lost_ns, *again)
        waiting = self._services[request.service]
        return is_worth_preempting(waiting, states, self._services.values(), lost_ns / 1e9)

    def _compact(self, service: str, blocks: int) -> bool:
        """BlockMove blocks so that ``blocks`` more of a service can be allocated; whether that worked."""
        moves = self._pool.compact(service, blocks)
        if moves is None:
            return False
        self._store.compacted(moves)
        return True

    def _preempt_one(self) -> None:
        """Take the memory of one running request, as the victim policy says; never the oldest admitted.

        Where it runs alone, it needs what is kept for requests that move.
        """
        table = RequestTable(())
        for state in self._services.values():
            table = table.joined(state.running)
        candidates = table.take(table.seq_id.argsort()[1:])
        if not len(candidates):
            revoked = self._store.leases.revoke_newest()
            assert revoked, "one request alone lacks memory"
            return
        pressure = MemoryPressure(
            candidates, _Forecasts(self._services), self._store.capacity, lambda: self._keys(candidates)
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

    def _num_running(self) -> int:
        """How many requests hold memory."""
        return sum([len(state.running) for state in self._services.values()])

    def _preemptible(self, request: RequestState, *, starved: bool) -> list[RequestState]:
        """Running requests that must give way to ``request``, the least urgent last.

        Those that the order finds less urgent, never the oldest admitted. For a ``starved`` one everybody,
        but first those of its own service: one that has too much to do does not take it out on others.
        Under slices nobody gives way inside one.
        """
        own = 0.0
        if not starved:  # then it waits
            own = float(self._order.keys(self._services[request.service], RequestTable([request]))[0])
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

    def _would_fit(self, request: RequestState, gone: Sequence[RequestState], *, always: bool) -> bool:
        """Whether ``request`` could be admitted if all of ``gone`` gave up their memory.

        always: whatever the admission says, if there is room for its known tokens.
        """
        if len(gone) == self._num_running() and not self._store.leases.demand:
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
            return joined.footprint + others <= self._store.capacity
        others_running = list(forecasts.values())
        return self._admission.how_many_fit(own, candidate, others_running, self._store.capacity) == 1

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
        return sum(self._pool.merged_demand(*item) for item in held.items()) <= self._store.capacity
