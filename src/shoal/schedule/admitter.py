"""Admission of waiting requests to a step: prefix cache hits, swap-in, free memory, admission policy."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

import numpy as np

from shoal.core import BlockCopy
from shoal.forecast import SharedBlocks
from shoal.kvcache import BlockPool
from shoal.schedule.batching import ScheduledBatch, slice_blocks, slice_end, slice_ends
from shoal.schedule.policies.admissions import Admission
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import RequestTable, RunningBatch
from shoal.schedule.service_state import ServiceState


def choice_with_prompt(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """A running choice of the same call that has computed the prompt."""
    for choice in request.choices:
        if choice.seq_id >= 0 and batch.num_computed[batch.row_of(choice)] >= choice.num_prompt_tokens:
            return choice
    return None


def choice_computing_prompt(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """The running choice of the same call that is computing the prompt; None if none is."""
    if not request.choices or choice_with_prompt(request, batch) is not None:
        return None
    return next((choice for choice in request.choices if choice.seq_id >= 0), None)


LOOKAHEAD = 8
"""Number of waiting requests in one forecast."""


class Rejection(Enum):
    """Why a request was not admitted."""

    BLOCKED = auto()
    """It was preempted for lack of memory, and no request has ended since (slices only)."""
    SLOTS = auto()
    """``max_running`` requests are running."""
    MEMORY = auto()
    BATCH = auto()
    """Another batch of the service runs (admission ``batch`` only)."""
    FRAGMENTED = auto()
    """There is memory, but no free merged block; a compaction helps."""


class Admitted(NamedTuple):
    """A waiting request that joins the next plan; its blocks are allocated."""

    request: RequestState
    num_new_tokens: int
    """Tokens that it computes in the plan."""
    copies: Sequence[BlockCopy]
    """Swap-in, or the copy-on-write of its last block if every known token was cached. A source on the device
    stays referenced until the plan's update."""


class Admitter:
    """Admits requests of one service to one plan, one after another.

    steppable: services that can step; running requests of others give way. scheduled: the running requests'
    part of the plan. Admission takes none of the blocks that it needs, and preempts nothing.
    """

    def __init__(
        self,
        pool: BlockPool,
        admission: Admission,
        service: str,
        store: RequestStore,
        steppable: Mapping[str, ServiceState],
        scheduled: ScheduledBatch,
    ) -> None:
        self.admitted: list[Admitted] = []
        self.rejected: tuple[RequestState, Rejection] | None = None
        """The request that was not admitted, and why."""
        self.needed = 0
        """Blocks for the last request examined, including the running requests' ``new_blocks``."""
        self._pool = pool
        self._admission = admission
        self._state = store.services[service]
        self._services = steppable
        self._capacity = store.capacity
        self._scheduled = scheduled
        self._new_blocks = scheduled.new_blocks
        self._num_ended = store.num_ended
        self._fitting: list[RequestState] = []  # next candidates that are known to fit

    def admit_all(
        self,
        waiting: Iterable[RequestState],
        num_running: int,
        max_running: int,
        epoch: int,
        starved: RequestState | None,
    ) -> None:
        """Admit until a request is rejected or the plan's budget is used up.

        num_running: running requests of all services that can step, at most ``max_running``. epoch: state of
        the scheduler; a request rejected in this epoch is not examined again. starved: a starved request,
        which is admitted without asking the admission policy.
        """
        if self._admission.by_batch and starved is None:
            waiting = self._of_one_batch(waiting, epoch)
        budget = min(self._scheduled.budget, self._scheduled.prompt_budget)
        queue = islice(waiting, self._scheduled.budget_rows)
        candidates: list[RequestState] = []
        while budget:
            if not candidates:
                candidates = list(islice(queue, LOOKAHEAD))
                if not candidates:
                    return
            request = candidates[0]
            if request.choices and self._waits_for_prompt(request):
                del candidates[0]  # skipped: its prompt will be computed soon
                continue
            if request.rejected_epoch == epoch and starved is None:
                return
            tokens: int | Rejection = Rejection.SLOTS
            if num_running < max_running:
                tokens = self._admit(candidates, budget, force=num_running == 0 or request is starved)
            if isinstance(tokens, Rejection):
                request.rejected_epoch = epoch
                self.rejected = (request, tokens)
                return
            budget -= tokens
            num_running += 1
            del candidates[0]

    def _of_one_batch(self, waiting: Iterable[RequestState], epoch: int) -> Sequence[RequestState]:
        """Waiting requests of the batch that runs, or if none does, of the next one."""
        first = next(iter(waiting), None)
        if first is None or first.rejected_epoch == epoch:
            return ()
        waiting_batches = self._state.waiting.batches
        batches = {request.batch_order for request in self._state.running.requests}
        if not batches:
            batches = {min(waiting_batches)}
        elif batches.isdisjoint(waiting_batches):
            first.rejected_epoch = epoch
            self.rejected = (first, Rejection.BATCH)
            return ()
        return [request for request in waiting if request.batch_order in batches]

    def _admit(self, candidates: Sequence[RequestState], budget: int, *, force: bool) -> int | Rejection:
        """Admit the first of ``candidates`` if it fits; returns its tokens in this plan, or the rejection.

        force: without asking the admission policy. There must be room for all known tokens, even if the
        budget allows only a part of them in this plan; otherwise half a prompt would be admitted and then
        preempted.
        """
        pool, request, size = self._pool, candidates[0], self._pool.block_size
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is not None and request.blocked_until_num_ended > self._num_ended and not force:
            return Rejection.BLOCKED
        hits = self._find_cached_blocks(request)
        table_tokens = request.num_tokens if slice_tokens is None else slice_end(request, slice_tokens)
        needed = -(-table_tokens // size) - len(hits)
        # At least one token must be computed. If all blocks were found, the last is copied and rewritten.
        rewrite = len(hits) * size == request.num_tokens
        if rewrite and not pool.can_allocate(request.service, self._new_blocks + needed + 1):
            # No room for both the block and its copy: its tokens are computed again.
            pool.free(request.service, [hits.pop()])
            rewrite = False
            needed += 1
        kept = hits[:-1] if rewrite else hits
        rejection = self._check_memory(candidates, kept, needed + rewrite, force=force)
        if rejection is not None:
            # The blocks found become cached again, so a compaction may take them.
            self.needed += len(hits)
            pool.free(request.service, hits)
            return rejection
        computed = request.num_tokens - 1 if rewrite else max(len(hits) * size, request.num_swapped_tokens)
        tokens = min(budget, request.num_tokens - computed)
        self._allocate(request, hits, kept, computed, tokens)
        return tokens

    def _allocate(
        self, request: RequestState, hits: Sequence[int], kept: list[int], computed: int, tokens: int
    ) -> None:
        """Fill the block table of an admitted request, for ``tokens`` beyond those ``computed``."""
        service, size, slice_tokens = request.service, self._pool.block_size, self._admission.slice_tokens
        request.num_computed = request.num_scheduled = computed
        table_tokens = computed + tokens
        request.slice_end = request.num_final_tokens
        if slice_tokens is not None:
            table_tokens = request.slice_end = slice_end(request, slice_tokens)
        fresh = self._pool.allocate(service, -(-table_tokens // size) - len(kept))
        assert fresh is not None
        request.block_ids = kept + fresh
        request.num_published, request.num_shareable = len(hits), len(kept)
        self._state.shared.hold(kept)
        copies: list[BlockCopy]
        if len(hits) > len(kept):
            copies = [BlockCopy(service, hits[-1], fresh[0])]
        else:
            back = zip(request.swapped_blocks[len(kept) :], request.block_ids[len(kept) :], strict=False)
            copies = [BlockCopy(service, source, target, source_host=True) for source, target in back]
        self.admitted.append(Admitted(request, tokens, copies))

    def _waits_for_prompt(self, request: RequestState) -> bool:
        """Whether another choice of the same call is computing the prompt, to be shared when it is done."""
        if request.swapped_blocks or request.num_prompt_tokens < self._pool.block_size:
            return False
        batch = self._state.running
        if choice_with_prompt(request, batch) is not None:
            return False
        admitted = [admitted.request for admitted in self.admitted]
        return any(choice.seq_id >= 0 or choice in admitted for choice in request.choices)

    def _share_prompt_of_choice(self, request: RequestState, most: int) -> list[int]:
        """Full prompt blocks of another choice of the same call, each with one more reference."""
        holder = choice_with_prompt(request, self._state.running)
        full = min(most, request.num_prompt_tokens // self._pool.block_size)
        if holder is None or not full:
            return []
        # From now on these blocks count as shared.
        if holder.num_shareable < full:
            self._state.shared.hold(holder.block_ids[holder.num_shareable : full])
            holder.num_shareable = full
        blocks = holder.block_ids[:full]
        self._pool.share(request.service, blocks)
        return blocks

    def _find_cached_blocks(self, request: RequestState) -> list[int]:
        """Cached blocks of the request's leading tokens, each with one more reference."""
        hits: list[int] = []
        most = request.num_cacheable_tokens // self._pool.block_size
        if self._pool.prefix_caching:
            request.extend_hashes(self._pool.block_size, request.num_tokens // self._pool.block_size)
            hits = self._pool.match_prefix(request.service, request.block_hashes[:most])
        return hits or self._share_prompt_of_choice(request, most)

    def _check_memory(
        self, candidates: Sequence[RequestState], kept: Sequence[int], needed: int, *, force: bool
    ) -> Rejection | None:
        """Why the first of ``candidates`` does not get its ``needed`` blocks; None if it does."""
        pool, request = self._pool, candidates[0]
        self.needed = self._new_blocks + needed
        fragmented = not pool.can_allocate(request.service, self.needed)
        if fragmented and (self.admitted or not pool.can_compact(request.service, self.needed)):
            return Rejection.MEMORY
        if not force:
            if not self._fits(candidates, kept):
                return Rejection.MEMORY
            if self._admission.slice_tokens is not None and not self._leaves_next_slice(request):
                return Rejection.MEMORY
        return Rejection.FRAGMENTED if fragmented else None

    def _fits(self, candidates: Sequence[RequestState], kept: Sequence[int]) -> bool:
        """Whether the admission policy accepts the first of ``candidates``; ``kept``: its cached blocks."""
        if self._fitting and self._fitting[0] is candidates[0] and not kept:
            del self._fitting[0]
            return True
        running = self._forecast()
        others = [
            state.forecast()
            for state in self._services.values()
            if state is not self._state and len(state.running)
        ]
        if kept:
            self._fitting = []
            joined = running.plus(RequestTable(candidates[:1]), self._shared_blocks(kept))
            return self._admission.fits([joined, *others], self._capacity)
        count = self._admission.how_many_fit(running, RequestTable(candidates), others, self._capacity)
        self._fitting = list(candidates[1:count])
        return count > 0

    def _forecast(self) -> MemoryForecast:
        """Memory forecast of the service's running requests and those admitted so far."""
        running = self._state.forecast()
        if not self.admitted:
            return running
        admitted = RequestTable([admitted.request for admitted in self.admitted])
        return running.plus(admitted, self._shared_blocks())

    def _shared_blocks(self, kept: Sequence[int] | None = None) -> SharedBlocks | None:
        """Blocks shared among these requests, and one more that would start with the blocks ``kept``."""
        shared = self._state.shared
        requests = self._state.running.requests + [admitted.request for admitted in self.admitted]
        tables: list[tuple[Sequence[int], int]] = [
            (request.block_ids, request.num_shareable) for request in requests
        ]
        if kept is None:
            return shared.sets(tables)
        shared.hold(kept)
        sets = shared.sets([*tables, (kept, len(kept))])
        shared.drop(kept)
        return sets

    def _leaves_next_slice(self, request: RequestState) -> bool:
        """Whether, with ``request`` admitted, at least one request could get its next slice."""
        size, slice_tokens = self._pool.block_size, self._admission.slice_tokens
        assert slice_tokens is not None
        following = min(slice_end(request, slice_tokens) + slice_tokens, request.num_final_tokens)
        # Usually ``request`` itself could, and the other requests need not be examined.
        if self._could_grow(
            request.service, -(-following // size) - slice_blocks(request, slice_tokens, size)
        ):
            return True
        batches = [state.running for state in self._services.values()]
        tables = [*batches, RequestTable([admitted.request for admitted in self.admitted])]
        return any(
            self._could_grow(table.requests[0].service, _smallest_next_slice(table, slice_tokens, size))
            for table in tables
            if len(table)
        )

    def _could_grow(self, service: str, blocks: int) -> bool:
        if service == self._state.service:
            return self._pool.can_allocate(service, self.needed + blocks)
        taken, view = (
            self._pool.merged_demand(self._state.service, self.needed),
            self._services[service].layout,
        )
        also = -(-taken * view.blocks_per_merged // view.units_per_block)
        return blocks == 0 or self._pool.can_allocate(service, blocks + also)


def _smallest_next_slice(table: RequestTable, slice_tokens: int, block_size: int) -> int:
    """The fewest blocks that any of these requests needs for its next slice."""
    ends = np.maximum(table.slice_end, table.num_tokens_with_in_flight)
    following = -(-slice_ends(ends, table.num_final_tokens, slice_tokens) // block_size)
    return max(0, int((following - table.num_blocks).min()))
