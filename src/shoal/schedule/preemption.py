"""Preemption and compaction: when room is made, and for which request; a victim policy chooses the victim."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np

from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Rejection
from shoal.schedule.batching import next_slice_blocks, slice_blocks
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.policies.victims import VICTIMS, MemoryPressure
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable
from shoal.schedule.service_state import ServiceState
from shoal.schedule.step_tracker import InFlightStep
from shoal.schedule.weights import Weights


def execution_s(state: ServiceState) -> float:
    """L: mean execution time of the service's requests; that of a request alone, if it is known."""
    traits = state.traits
    return max(traits.mean_s if traits.alone_s is None else traits.alone_s, 1e-9)


def is_worth_preempting(
    waiting: ServiceState,
    victims: Sequence[ServiceState],
    services: Iterable[ServiceState],
    cost_s: float,
) -> bool:
    """Whether a request gains more than ``victims`` lose, each in units of its service's execution time.

    Running requests end at a rate of N / L, so W seconds pass until as many have ended as there are victims.
    Without preemption the request waits W. With it every victim waits W (it is the first to be admitted
    again), and has to be saved or computed again in ``cost_s``. It is worth it if W / L of the request
    exceeds the sum of (W + cost) / L of the victims. Our rule, after Smith's: memory goes to the request that
    needs it for the shortest time.
    """
    ends_per_s = sum([len(state.running) / execution_s(state) for state in services])
    wait_s = len(victims) / ends_per_s
    lost = sum([(wait_s + cost_s) / execution_s(state) for state in victims])
    return wait_s / execution_s(waiting) > lost


class _Forecasts(Mapping[str, MemoryForecast]):
    """Every service's forecast, created on first use: most victim policies need none."""

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
    """Memory is short, and plans in flight may free some; they must end before a preemption."""


def _joined(states: Iterable[ServiceState]) -> RequestTable:
    """Running requests of these services, longest admitted first."""
    table = RequestTable(())
    for state in states:
        if len(state.running):
            table = table.joined(state.running)
    return table.take(table.seq_id.argsort())


class Preemptor:
    """Makes room by compaction and preemption; raises WaitForInFlight if plans in flight must end first.

    If running requests need blocks and none is free, the pool is compacted, or requests are preempted
    until they fit; the requests that need blocks are candidates, too. A waiting request can preempt only if
    it has starved, or if ``preempt_for_waiting`` allows it (never if its latency goals can no longer be met).
    With slices, no request is preempted inside a slice; if all running requests wait for a slice and none can
    get it, one of them is preempted. Requests whose weights are absent give way first: to running and to
    waiting requests, the one admitted longest ago, too.

    Plans in flight may end requests, so they are waited for. Therefore a preempted request is never part of a
    plan in flight, and its blocks are freed at once.

    in_flight: the scheduler's plans in flight.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        weights: Weights,
        options: SchedulerOptions,
        in_flight: Collection[InFlightStep],
    ) -> None:
        self._pool = pool
        self._store = store
        self._services = store.services
        self._weights = weights
        self._order = options.order
        self._victim = VICTIMS[options.victim]()
        self._admission = options.admission
        self._mode = options.preempt_for_waiting
        self._max_batched_tokens = options.max_batched_tokens
        self._in_flight = in_flight

    def make_room(self, service: str, blocks: int) -> bool:
        """Free memory for running requests, by compaction or else by preempting one. Always True."""
        self._require_drained()
        if not self._compact(service, blocks):
            self._preempt_one()
        return True

    def make_room_for(
        self, request: RequestState, rejection: Rejection, blocks: int, *, starved: bool
    ) -> bool:
        """Make room so that a rejected request may be admitted; returns whether anything was done.

        blocks: needed in total, of its service. starved: it may preempt any request.
        """
        try:
            if rejection is Rejection.MEMORY and self._preempt_absent_for(request, blocks):
                return True
            if rejection is Rejection.FRAGMENTED:
                self._require_drained()
                return self._compact(request.service, blocks)
            # Lack of slots alone is no reason to preempt: running requests make progress and end soon.
            wanted = rejection is Rejection.MEMORY and self._mode != "never" and not request.deprioritized
            if wanted or (starved and rejection in (Rejection.MEMORY, Rejection.SLOTS)):
                return self._preempt_for(request, starved=starved)
        except WaitForInFlight:
            request.rejected_epoch = -1  # so that the next call examines it again
            raise
        return False

    def preempt_for_slice(self, request: RequestState) -> bool:
        """Preempt another request between slices for a starved running request that gets no slice."""
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
        """If all running requests wait for a slice, compact or preempt one; returns whether it did."""
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is None or self._in_flight or self._num_running() < 2:
            return False
        if any(np.count_nonzero(state.running.postponed) for state in self._services.values()):
            return False  # these may still make progress when they are ready
        for state in self._services.values():
            for blocks in next_slice_blocks(state.running, slice_tokens, self._pool.block_size):
                if self._compact(state.service, blocks):
                    return True
        self._preempt_one()
        return True

    def _preempt_absent_for(self, request: RequestState, blocks: int) -> bool:
        """Preempt one request whose weights are absent, if that helps; returns whether it did."""
        if self._pool.can_allocate(request.service, blocks):
            return False  # the admission policy has refused it
        absent = self._absent_requests()
        if not len(absent) or not self._would_fit(request, absent.requests, force=True):
            return False
        self._require_drained()
        self._preempt_among(absent)
        return True

    def _absent_requests(self) -> RequestTable:
        """Running requests whose weights are absent, longest admitted first."""
        return _joined(self._weights.absent)

    def _require_drained(self) -> None:
        if self._in_flight:
            raise WaitForInFlight

    def _preempt_for(self, request: RequestState, *, starved: bool) -> bool:
        """Preempt as many requests as ``request`` needs, least urgent first, if that is possible."""
        preemptible = self._preemptible(request, starved=starved)
        if self._mode == "gain" and not starved:
            own_s = execution_s(self._services[request.service])
            preemptible = [
                other for other in preemptible if execution_s(self._services[other.service]) > own_s
            ]
        if not preemptible or not self._would_fit(request, preemptible, force=starved):
            return False
        too_few, enough = 0, len(preemptible)
        while enough - too_few > 1:
            half = (too_few + enough) // 2
            if self._would_fit(request, preemptible[-half:], force=starved):
                enough = half
            else:
                too_few = half
        victims = preemptible[-enough:]
        if self._mode == "gain" and not starved and not self._gains_more(request, victims):
            return False
        self._require_drained()
        for victim in victims:
            victim.num_preempted_by_starvation += starved
            self._store.preempt(victim)
        return True

    def _gains_more(self, request: RequestState, victims: Sequence[RequestState]) -> bool:
        """Whether a waiting request gains more than all victims lose."""
        states = [self._services[victim.service] for victim in victims]
        # With swapping, the cost is one step that saves the KV and loads it again.
        cost_ns = max([max(state.recent_steps_ns, default=0) for state in states])
        if not self._store.has_swap:  # Recomputation; also estimated by tokens, as chunks may be small.
            max_tokens = [int(state.running.num_computed.max()) for state in states]
            steps = -(-max(max_tokens) // self._max_batched_tokens)
            by_tokens = [
                state.prompt_token_ns() * count for state, count in zip(states, max_tokens, strict=True)
            ]
            cost_ns = max(steps * cost_ns, *by_tokens)
        waiting = self._services[request.service]
        return is_worth_preempting(waiting, states, self._services.values(), cost_ns / 1e9)

    def _compact(self, service: str, blocks: int) -> bool:
        """Compact the pool so that ``blocks`` blocks can be allocated; returns whether that worked."""
        moves = self._pool.compact(service, blocks)
        if moves is None:
            return False
        self._store.apply_compaction(moves)
        return True

    def _preempt_one(self) -> None:
        """Preempt one running request: one whose weights are absent, else not the one admitted longest ago.

        If only one can step, a lease is revoked instead.
        """
        candidates = self._absent_requests()
        if not len(candidates):
            table = _joined(self._weights.steppable.values())
            candidates = table.take(np.arange(1, len(table)))
        if not len(candidates):
            revoked = self._store.leases.revoke_newest()
            assert revoked, "one request alone lacks memory"
            return
        self._preempt_among(candidates)

    def _preempt_among(self, candidates: RequestTable) -> None:
        """Preempt one of these running requests, by the victim policy."""
        pressure = MemoryPressure(
            candidates, _Forecasts(self._services), self._store.capacity, lambda: self._keys(candidates)
        )
        self._store.preempt(self._victim.choose(pressure))

    def _keys(self, candidates: RequestTable) -> FloatArray:
        """Priority keys of some running requests, by the order."""
        keys = np.zeros(len(candidates))
        for name, state in self._services.items():
            own = np.array([request.service == name for request in candidates.requests])
            if own.any():
                rows, _ = state.running.rows_of(candidates.seq_id[own])
                keys[own] = self._order.keys(state, state.running)[rows]
        return keys

    def _num_running(self) -> int:
        return sum([len(state.running) for state in self._services.values()])

    def _preemptible(self, request: RequestState, *, starved: bool) -> list[RequestState]:
        """Running requests that may be preempted for ``request``, the least urgent last.

        These are requests that are less urgent by the order, except the one admitted longest ago. For a
        ``starved`` request they are all, those of its own service first to go: an overloaded service should
        not slow down the others. With slices, requests inside a slice are excluded.
        """
        own_key = 0.0
        if not starved:  # a starved request may be running
            own_key = float(self._order.keys(self._services[request.service], RequestTable([request]))[0])
        batches = [state.running for state in self._weights.steppable.values() if len(state.running)]
        oldest = min((int(batch.seq_id[0]) for batch in batches), default=0)
        found: list[tuple[tuple[bool, float, int], RequestState]] = []
        for state in self._services.values():
            batch = state.running
            if not len(batch):
                continue
            keys = self._order.keys(state, batch)
            less_urgent = (
                np.ones(len(batch), dtype=np.bool_)
                if starved
                else (keys > own_key) & (batch.seq_id != oldest)
            )
            if self._admission.slice_tokens is not None:
                less_urgent &= batch.num_tokens_with_in_flight >= batch.slice_end
            same = starved and state.service == request.service
            for row in less_urgent.nonzero()[0].tolist():
                found.append(((same, float(keys[row]), int(batch.seq_id[row])), batch.requests[row]))
        found.sort(key=itemgetter(0))
        return [other for _, other in found]

    def _would_fit(self, request: RequestState, victims: Sequence[RequestState], *, force: bool) -> bool:
        """Whether ``request`` could be admitted if all of ``victims`` were preempted.

        force: require only room for its known tokens, without asking the admission policy.
        """
        if len(victims) == self._num_running() and not self._store.leases.demand:
            return True
        if self._admission.slice_tokens is not None and not self._slice_fits(request, victims):
            return False
        forecasts = {
            name: state.forecast_without(self._rows_of(victims, state))
            for name, state in self._services.items()
        }
        own = forecasts.pop(request.service)
        candidate = RequestTable([request])
        if force:
            joined = own.plus(candidate, own.shared)
            others = sum(forecast.footprint for forecast in forecasts.values())
            return joined.footprint + others <= self._store.capacity
        others_running = list(forecasts.values())
        return self._admission.how_many_fit(own, candidate, others_running, self._store.capacity) == 1

    def _rows_of(self, victims: Sequence[RequestState], state: ServiceState) -> IntArray:
        seq_ids = np.array(
            [request.seq_id for request in victims if request.service == state.service], dtype=np.int64
        )
        return state.running.rows_of(seq_ids)[0] if len(seq_ids) else seq_ids

    def _slice_fits(self, request: RequestState, victims: Sequence[RequestState]) -> bool:
        """Whether its first slice could be allocated if ``victims`` freed their unshared blocks."""
        assert self._admission.slice_tokens is not None
        held = {name: self._pool.live_blocks(name) for name in self._services}
        for other in victims:
            held[other.service] -= len(other.block_ids) - other.num_shareable
        held[request.service] += slice_blocks(request, self._admission.slice_tokens, self._pool.block_size)
        return sum(self._pool.merged_demand(*item) for item in held.items()) <= self._store.capacity
