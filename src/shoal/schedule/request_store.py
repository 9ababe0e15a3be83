"""RequestStore: moves requests between waiting, running and ended; preemption, swap-out, cancellation."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shoal.core import BlockCopy, FinishReason, Request, TokenEvent
from shoal.kvcache import BlockMove, BlockPool
from shoal.schedule.client_accounts import NO_ACCOUNT, Account, ClientAccounts
from shoal.schedule.leases import Leases
from shoal.schedule.policies.orders import Order
from shoal.schedule.request_state import RequestState, last_event
from shoal.schedule.running_batch import RunningBatch
from shoal.schedule.service_state import ServiceState
from shoal.schedule.slo_expired import may_be_refused, refusal_message
from shoal.schedule.stats import Counters, SchedulerStats, ServiceStats, WeightsStats

OnEnd = Callable[[RequestState, FinishReason, int], None]
"""Called with every request that ends, the reason and the time; other requests may be in the middle of an
update."""
OnTransition = Callable[[str, bool], None]
"""Called with the id of a request, and whether it was admitted to the running batch (True) or preempted."""


class RequestStore:
    """Moves requests between waiting, running and ended, and blocks between their block tables and the pools.

    host: the host's pool for swapped KV; without it, preempted requests are computed again.
    max_token_gap_ns: ended requests with a longer inter-token latency are counted.
    """

    def __init__(
        self,
        pool: BlockPool,
        services: Mapping[str, ServiceState],
        order: Order,
        host: BlockPool | None = None,
        on_end: OnEnd | None = None,
        max_token_gap_ns: int = sys.maxsize,
    ) -> None:
        self.services = services
        self.requests: dict[str, RequestState] = {}
        """Unfinished requests by id."""
        self.left: list[int] = []
        """For the next plan: sequences that leave the batch."""
        self.swap_out_copies: list[BlockCopy] = []
        """For the next plan: copies out of freed blocks."""
        self.moved: dict[int, tuple[int, ...]] = {}
        """For the next plan: block tables after a compaction."""
        self.leases = Leases(pool)
        self.num_admissions = 0
        """Also the next sequence id."""
        self.num_ended = 0
        """Number of ended requests."""
        self.num_queued = 0
        """How often a request has begun to wait."""
        self.num_releases = 0
        """How often a request has freed its blocks."""
        self.on_transition: OnTransition | None = None
        """Set by the owner; optional."""
        self._pool = pool
        self._host = host
        self._order = order
        self._on_end = on_end
        self._max_token_gap_ns = max_token_gap_ns
        self._accounts = None if order.prices is None else ClientAccounts(order.prices)
        self._refused: list[TokenEvent] = []
        # Counters of a removed service are kept, and continue if it is added again.
        self._counters: defaultdict[str, Counters] = defaultdict(Counters)

    @property
    def has_swap(self) -> bool:
        """Whether KV of preempted requests is saved on the host, if there is room."""
        return self._host is not None

    @property
    def capacity(self) -> int:
        """Merged blocks (split: units) of the pool that are not leased."""
        return self._pool.capacity - self.leases.demand

    def add(self, request: RequestState, now_ns: int) -> None:
        """Queue a new or resumed request."""
        if request.request.resume_state is None:
            self.services[request.service].statistics.monitor.arrived(now_ns)
            request.last_scheduled_ns = now_ns
        if self._accounts is not None:
            self._accounts.arrived(request.account)
        self.wait(request)

    def wait(self, request: RequestState) -> None:
        """Queue a request without blocks, ranked by the order."""
        state = self.services[request.service]
        self.num_queued += 1
        self.requests[request.request.id] = request
        request.rank = self._order.rank(request, state)
        state.waiting.add(request)
        if self._accounts is not None:
            self._accounts.waits(request.account)

    def _leave_queue(self, request: RequestState) -> None:
        """Remove a request from the waiting ones."""
        self.services[request.service].waiting.remove(request)
        if self._accounts is not None:
            self._accounts.waits_no_more(request.account)

    def demote_or_reject_expired(self, now_ns: int, *, refuse: bool) -> bool:
        """Put waiting requests with expired latency goals last; returns whether there were any.

        refuse: end them instead, if no choice of the call has output yet.
        """
        found = [
            request
            for state in self.services.values()
            for request in state.waiting.demote_slo_expired(now_ns)
        ]
        if refuse:
            # All choices of a call expire together; either all or none of them are refused.
            for request in [request for request in found if may_be_refused(request)]:
                message = refusal_message(request, now_ns)
                self._refused.append(self.end(request, FinishReason.REFUSED, now_ns, error=message))
        return bool(found)

    def fail(self, services: Collection[str], error: str, now_ns: int) -> None:
        """End all requests of these services, which are in no plan in flight, as UNLOADED."""
        for request in [each for each in self.requests.values() if each.service in services]:
            self._refused.append(self.end(request, FinishReason.UNLOADED, now_ns, error=error))

    def take_refused(self) -> list[TokenEvent]:
        """The last events of requests refused, or ended by ``fail``, since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def admit(self, request: RequestState, now_ns: int) -> None:
        """Run a waiting request whose block table has been filled."""
        self._leave_queue(request)
        self.run(request, now_ns)

    def run(self, request: RequestState, now_ns: int) -> None:
        """Add a request whose block table has been filled to the running batch."""
        request.seq_id = self.num_admissions
        self.num_admissions += 1
        counters = self._counters[request.service]
        if not request.num_admissions:
            request.queue_ns = now_ns - request.arrival_ns
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            counters.prompt_tokens += request.num_prompt_tokens
            counters.cached_tokens += request.num_cached_tokens
            if self._accounts is not None:
                computed = request.num_prompt_tokens - request.num_cached_tokens
                self._accounts.charge_prompt(
                    request.account, computed, self.services[request.service].weight_bytes
                )
        request.num_admissions += 1
        if request.num_lost_tokens:
            again = max(0, request.num_lost_tokens - request.num_computed)
            counters.recomputed_tokens += again
            request.num_recomputed_tokens += again
            request.num_lost_tokens = 0
        self.services[request.service].running.add(request)
        if self.on_transition is not None:
            self.on_transition(request.request.id, True)

    def preempt(self, request: RequestState, *, lacks_memory: bool = True) -> None:
        """Preempt a running request that is part of no plan in flight: it frees its blocks and waits.

        Its KV is saved on the host if there is room, otherwise dropped.
        lacks_memory: with slices, it is not admitted again before another request has ended.
        """
        self._leave_batch(request)
        request.num_preemptions += 1
        request.num_lost_tokens = request.num_computed
        counters = self._counters[request.service]
        counters.preemptions += 1
        if self._swap_out(request):
            counters.swapped_tokens += request.num_computed
        self.release(request)
        request.num_scheduled = request.num_computed = request.num_published = 0
        request.blocked_until_num_ended = self.num_ended + 1 if lacks_memory else 0
        self.wait(request)
        if self.on_transition is not None:
            self.on_transition(request.request.id, False)

    def preempt_all(self) -> None:
        """Preempt all running requests and revoke all leases; no plan is in flight."""
        while self.leases.revoke_newest():
            pass
        for state in self.services.values():
            for request in list(state.running.requests):
                self.preempt(request, lacks_memory=False)

    def _swap_out(self, request: RequestState) -> bool:
        if self._host is None or not request.num_computed:
            return False
        blocks = self._host.allocate(request.service, -(-request.num_computed // self._host.block_size))
        if blocks is None:
            return False
        self.swap_out_copies += [
            BlockCopy(request.service, source, target, target_host=True)
            for source, target in zip(request.block_ids, blocks, strict=False)
        ]
        request.swapped_blocks, request.num_swapped_tokens = blocks, request.num_computed
        return True

    def take_swapped(self, request: RequestState) -> list[int]:
        """The host blocks of a request that is swapped in; the caller frees them after the copies."""
        swapped, request.swapped_blocks, request.num_swapped_tokens = request.swapped_blocks, [], 0
        return swapped

    def free_swapped(self, service: str, blocks: Sequence[int]) -> None:
        if blocks and self._host is not None:
            self._host.free(service, blocks)

    def _drop_swapped(self, request: RequestState) -> None:
        """Free a request's swapped KV, and cancel copies to it that are still pending."""
        if request.swapped_blocks:
            self.swap_out_copies = [
                copy
                for copy in self.swap_out_copies
                if not (
                    copy.target_host
                    and copy.service == request.service
                    and copy.target in request.swapped_blocks
                )
            ]
            self.free_swapped(request.service, self.take_swapped(request))

    def drop_all_swapped(self) -> None:
        """Free the swapped KV of all requests."""
        for request in self.requests.values():
            self._drop_swapped(request)

    def apply_compaction(self, moves: Sequence[BlockMove]) -> None:
        """Update block tables after a compaction, and queue its copies for the next plan."""
        renamed: dict[str, dict[int, int]] = defaultdict(dict)
        for move in moves:
            self.swap_out_copies.append(BlockCopy(move.service, move.source, move.target))
            renamed[move.service][move.source] = move.target
        for service, moved in renamed.items():
            for request in self.services[service].rename(moved):
                self.moved[request.seq_id] = tuple(request.block_ids)
            self._counters[service].compacted_blocks += len(moved)
        self.leases.rename(moves)

    def count_output(self, service: str, tokens: int) -> None:
        self._counters[service].output_tokens += tokens

    @property
    def has_accounts(self) -> bool:
        """Whether tokens are charged to clients."""
        return self._accounts is not None

    def account_of(self, request: Request) -> Account:
        """The account of a request's client."""
        return NO_ACCOUNT if self._accounts is None else self._accounts.of(request.client)

    def charge_output(self, requests: Sequence[RequestState], tokens: Iterable[int]) -> None:
        """Charge output tokens of some requests of a service to their clients."""
        if self._accounts is not None and requests:
            weight_bytes = self.services[requests[0].service].weight_bytes
            charges = zip([request.account for request in requests], tokens, strict=False)
            self._accounts.charge_outputs(charges, weight_bytes)

    def count_failure(self, service: str) -> None:
        self._counters[service].failed_steps += 1

    def publish(self, batch: RunningBatch, rows: Sequence[int]) -> None:
        """Publish blocks of some requests that have become full and computed.

        A block whose hash another block already has stays private, and the blocks behind it do not count as
        shareable: other requests find them together with that other block.
        """
        size = self._pool.block_size
        published, full = batch.num_published[rows].tolist(), (batch.num_computed[rows] // size).tolist()
        for place, row in enumerate(rows):
            request, first = batch.requests[row], published[place]
            request.extend_hashes(size, full[place])
            hashes = request.block_hashes[first : full[place]]
            blocks = request.block_ids[first : first + len(hashes)]
            found = self._pool.publish(request.service, blocks, hashes)
            if request.num_shareable == first:
                request.num_shareable += found
                self.services[request.service].shared.hold(blocks[:found])
            published[place] += len(blocks)
        batch.num_published[rows] = published

    def cancel(self, request_id: str, now_ns: int, reason: FinishReason) -> TokenEvent | None:
        """End a request; returns its last event, or None if the id is unknown.

        Also None for a request in a plan in flight, whose last event comes with the update.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.seq_id >= 0:
            batch = self.services[request.service].running
            row = batch.row_of(request)
            if batch.in_flight[row]:
                request.ending = reason
                batch.is_ending[row] = 1
                return None
        return self.end(request, reason, now_ns)

    def end(
        self,
        request: RequestState,
        reason: FinishReason,
        now_ns: int,
        *,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """End a request without new tokens; returns its last event."""
        self.finish(request, reason, now_ns)
        return last_event(request, request.num_generated, reason, stop_token=stop_token, error=error)

    def finish(self, request: RequestState, reason: FinishReason, now_ns: int) -> None:
        """Remove a finished request, whose last event is told by the caller, and update statistics."""
        self.remove(request)
        if reason is not FinishReason.SLICE:
            self._counters[request.service].long_token_gaps += request.largest_gap_ns > self._max_token_gap_ns
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters[request.service].cancelled += reason is not FinishReason.SLICE
        else:
            self._counters[request.service].finished += 1
            if request.num_generated:
                self.services[request.service].statistics.finished(request, now_ns)
        if self._on_end is not None:
            self._on_end(request, reason, now_ns)

    def remove(self, request: RequestState) -> None:
        """Remove a request; its blocks are freed when no plan in flight uses them."""
        request.finished = True
        self.num_ended += 1
        if request.seq_id < 0:
            self._leave_queue(request)
        else:
            self._leave_batch(request)
        if request.choices:
            request.choices.remove(request)
            for choice in request.choices:
                choice.choice_has_output |= request.num_generated > 0
            request.choices = []
        if not request.in_flight:
            self.release(request)
        self._drop_swapped(request)
        del self.requests[request.request.id]

    def _leave_batch(self, request: RequestState) -> None:
        """Remove a request from the running batch; its blocks are released separately."""
        state = self.services[request.service]
        self.left.append(request.seq_id)
        self.moved.pop(request.seq_id, None)
        state.running.remove(request)
        request.seq_id = -1
        state.shared.drop(request.block_ids[: request.num_shareable])
        request.num_shareable = 0

    def release(self, request: RequestState) -> None:
        """Remove the request's references to its blocks."""
        self.num_releases += 1
        self._pool.free(request.service, request.block_ids)
        request.block_ids = []

    def stats(self, steps: int, weights: Mapping[str, WeightsStats]) -> SchedulerStats:
        """weights: by service."""
        services = {
            name: ServiceStats(
                waiting=len(state.waiting),
                running=len(state.running),
                unfilled_tokens=int(
                    state.running.num_blocks.sum() * self._pool.block_size - state.running.num_scheduled.sum()
                ),
                swapped=sum(bool(request.swapped_blocks) for request in state.waiting)
                if self._host is not None
                else 0,
                weights=weights.get(name),
                **self._counters[name].totals(),
            )
            for name, state in self.services.items()
        }
        return SchedulerStats(services, steps)
