"""Admitting requests that wait: what the prefix index or the host has of them, and whether the rest fits."""

from collections.abc import Iterable, Sequence
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


def prompt_holder(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """A running choice of the same call that has computed their prompt."""
    for choice in request.choices:
        if choice.seq_id >= 0 and batch.num_computed[batch.row_of(choice)] >= choice.num_prompt_tokens:
            return choice
    return None


def prompt_computer(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """The running choice of the same call that computes their prompt; None if it has been, or nobody does."""
    if not request.choices or prompt_holder(request, batch) is not None:
        return None
    return next((choice for choice in request.choices if choice.seq_id >= 0), None)


LOOKAHEAD = 8
"""So many requests that wait are forecast together."""


class Rejection(Enum):
    """Why a request was not admitted."""

    WAITS = auto()
    """It waits for another to end."""
    SLOTS = auto()
    """As many run as may."""
    MEMORY = auto()
    """There is no room for it."""
    FRAGMENTED = auto()
    """There is memory, but no merged block is free for it; a compaction helps."""


class Admitted(NamedTuple):
    """A waiting request that joins the next plan; its blocks are allocated."""

    request: RequestState
    """Who it is."""
    num_new_tokens: int
    """Tokens it computes there."""
    copies: Sequence[BlockCopy]
    """Swapped blocks that come back, or the copy-on-write of its last block where every known token was
    found; a copy's device source stays referenced until the plan's update."""


class Admitter:
    """Admits requests of one service to one plan, one after another.

    scheduled: what its running requests compute in the same plan; a request that waits takes none of the
    blocks that they need, and preempts nobody.
    """

    def __init__(
        self,
        pool: BlockPool,
        admission: Admission,
        service: str,
        store: RequestStore,
        scheduled: ScheduledBatch,
    ) -> None:
        self.admitted: list[Admitted] = []
        self.rejected: tuple[RequestState, Rejection] | None = None
        """Who was not admitted, and why."""
        self.needed = 0
        """Blocks that the last one examined would have taken, with ``new_blocks``."""
        self._pool = pool
        self._admission = admission
        self._state = store.services[service]
        self._services = store.services
        self._capacity = store.capacity
        self._scheduled = scheduled
        self._new_blocks = scheduled.new_blocks
        self._num_ended = store.num_ended
        self._fitting: list[RequestState] = []  # who comes next and fits, one after another

    def admit_all(
        self,
        waiting: Iterable[RequestState],
        num_running: int,
        max_running: int,
        epoch: int,
        urgent: RequestState | None,
    ) -> None:
        """Admit until somebody is rejected or nothing is left of the plan's budget.

        num_running: requests of all services that run now, at most ``max_running``. epoch: state of the
        scheduler; who was rejected in it is not looked at again. urgent: a starved request that is admitted
        whatever the admission says.
        """
        budget = min(self._scheduled.budget, self._scheduled.prompt_budget)
        queue = islice(waiting, self._scheduled.budget_rows)
        coming: list[RequestState] = []
        while budget:
            if not coming:
                coming = list(islice(queue, LOOKAHEAD))
                if not coming:
                    return
            request = coming[0]
            if request.choices and self._waits_for_prompt(request):
                del coming[0]  # it is passed over: soon its prompt will be there
                continue
            if request.rejected_epoch == epoch and urgent is None:
                return
            tokens: int | Rejection = Rejection.SLOTS
            if num_running < max_running:
                tokens = self._admit(coming, budget, always=num_running == 0 or request is urgent)
            if isinstance(tokens, Rejection):
                request.rejected_epoch = epoch
                self.rejected = (request, tokens)
                return
            budget -= tokens
            num_running += 1
            del coming[0]

    def _admit(self, coming: Sequence[RequestState], budget: int, *, always: bool) -> int | Rejection:
        """Admit the first of ``coming`` if memory allows: the tokens that it computes, or why not.

        always: whatever the admission says. All known tokens must find room at once, also where the budget
        makes this plan compute a part of them, so that half a prompt is not admitted to be preempted.
        """
        pool, request, size = self._pool, coming[0], self._pool.block_size
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is not None and request.blocked_until > self._num_ended and not always:
            return Rejection.WAITS
        hits = self._find(request)
        table_tokens = request.num_tokens if slice_tokens is None else slice_end(request, slice_tokens)
        needed = -(-table_tokens // size) - len(hits)
        # One token must be left to compute. If all blocks were found, a copy of the last is written again.
        rewrite = len(hits) * size == request.num_tokens
        if rewrite and not pool.can_allocate(request.service, self._new_blocks + needed + 1):
            # No room for that block beside its copy: its tokens are computed again.
            pool.free(request.service, [hits.pop()])
            rewrite = False
            needed += 1
        kept = hits[:-1] if rewrite else hits
        rejection = self._judge(coming, kept, needed + rewrite, always=always)
        if rejection is not None:
            # The blocks found will be cached again, so that a compaction may take them.
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
        """Fill the block table of an admitted request, for so many tokens beyond those ``computed``."""
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
        """Whether another choice of the same call computes their prompt, whose blocks it can have soon."""
        if request.swapped_blocks or request.num_prompt_tokens < self._pool.block_size:
            return False
        batch = self._state.running
        if prompt_holder(request, batch) is not None:
            return False
        admitted = [admitted.request for admitted in self.admitted]
        return any(choice.seq_id >= 0 or choice in admitted for choice in request.choices)

    def _find_in_choices(self, request: RequestState, most: int) -> list[int]:
        """Full blocks of its prompt that another choice of the same call holds, now with a reference more."""
        holder = prompt_holder(request, self._state.running)
        full = min(most, request.num_prompt_tokens // self._pool.block_size)
        if holder is None or not full:
            return []
        # From now on others know of them.
        if holder.num_shareable < full:
            self._state.shared.hold(holder.block_ids[holder.num_shareable : full])
            holder.num_shareable = full
        blocks = holder.block_ids[:full]
        self._pool.share(request.service, blocks)
        return blocks

    def _find(self, request: RequestState) -> list[int]:
        """Blocks of its leading tokens that are at hand, now with a reference each."""
        hits: list[int] = []
        most = request.num_cacheable_tokens // self._pool.block_size
        if self._pool.prefix_caching:
            request.hash_known(self._pool.block_size, request.num_tokens // self._pool.block_size)
            hits = self._pool.match_prefix(request.service, request.block_hashes[:most])
        return hits or self._find_in_choices(request, most)

    def _judge(
        self, coming: Sequence[RequestState], kept: Sequence[int], needed: int, *, always: bool
    ) -> Rejection | None:
        """Whether ``needed`` blocks are there for the first of ``coming``, and the admission agrees."""
        pool, request = self._pool, coming[0]
        self.needed = self._new_blocks + needed
        fragmented = not pool.can_allocate(request.service, self.needed)
        if fragmented and (self.admitted or not pool.can_compact(request.service, self.needed)):
            return Rejection.MEMORY
        if not always:
            if not self._fits(coming, kept):
                return Rejection.MEMORY
            if self._admission.slice_tokens is not None and not self._somebody_goes_on(request):
                return Rejection.MEMORY
        return Rejection.FRAGMENTED if fragmented else None

    def _fits(self, coming: Sequence[RequestState], kept: Sequence[int]) -> bool:
        """Whether the admission agrees to the first of ``coming``, who begins with the blocks ``kept``."""
        if self._fitting and self._fitting[0] is coming[0] and not kept:
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
            joined = running.plus(RequestTable(coming[:1]), self._shared_blocks(kept))
            return self._admission.fits([joined, *others], self._capacity)
        count = self._admission.how_many_fit(running, RequestTable(coming), others, self._capacity)
        self._fitting = list(coming[1:count])
        return count > 0

    def _forecast(self) -> MemoryForecast:
        """The memory of those who run and those admitted so far."""
        running = self._state.forecast()
        if not self.admitted:
            return running
        admitted = RequestTable([admitted.request for admitted in self.admitted])
        return running.plus(admitted, self._shared_blocks())

    def _shared_blocks(self, kept: Sequence[int] | None = None) -> SharedBlocks | None:
        """Blocks that several of those hold, and of one more that would begin with the blocks ``kept``."""
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

    def _somebody_goes_on(self, request: RequestState) -> bool:
        """Whether, with ``request`` admitted, some holder of KV could get its next slice."""
        size, slice_tokens = self._pool.block_size, self._admission.slice_tokens
        assert slice_tokens is not None
        following = min(slice_end(request, slice_tokens) + slice_tokens, request.num_final_tokens)
        # Mostly ``request`` could itself, and nobody need look at all the others.
        if self._could_grow(
            request.service, -(-following // size) - slice_blocks(request, slice_tokens, size)
        ):
            return True
        holders = [state.running for state in self._services.values()]
        tables = [*holders, RequestTable([admitted.request for admitted in self.admitted])]
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
    """The fewest blocks that one of some holders needs for the slice after this one."""
    ends = np.maximum(table.slice_end, table.num_tokens_with_in_flight)
    following = -(-slice_ends(ends, table.num_final_tokens, slice_tokens) // block_size)
    return max(0, int((following - table.num_blocks).min()))
