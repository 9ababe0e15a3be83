"""Decoding together: services on the same weights bring their decodes into each other's steps.

The service whose turn it is leads: its rows and blocks come first, as if it were alone. The others bring
decodes only, and take free blocks only: for their sake nobody is admitted or preempted, nothing is evicted or
moved.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shoal.kvcache import BlockPool
from shoal.schedule.admitter import Admitted
from shoal.schedule.batching import ScheduledBatch
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.running_batch import IntArray
from shoal.schedule.service_state import ServiceState


class CoBatched(NamedTuple):
    """Decodes of one service for a step that another leads."""

    state: ServiceState
    """The service."""
    rows: IntArray
    """Their rows in its running batch."""
    growing: Sequence[int]
    """Those that get a block each."""
    blocks: Sequence[int]
    """These blocks, allocated."""
    complete: bool
    """Whether nobody of the service who decodes stays out."""


class CoBatcher:
    """Finds decodes that may take part in the step of another service."""

    def __init__(
        self, pool: BlockPool, services: Mapping[str, ServiceState], options: SchedulerOptions
    ) -> None:
        self._pool = pool
        self._services = services
        self._most_rows = options.co_batch_rows

    def form(
        self, leader: ServiceState, scheduled: ScheduledBatch, admitted: Sequence[Admitted]
    ) -> list[CoBatched]:
        """Decodes for a step of ``leader``, whose own blocks are allocated; allocates theirs.

        scheduled, admitted: the leader's part. Services that have gone without a step for longest come first.
        Who is tried anew after a step that failed is tried apart from others.
        """
        found: list[CoBatched] = []
        limit = leader.limit
        if limit.has_suspects:
            return found
        room_tokens = scheduled.budget - sum([some.num_new_tokens for some in admitted])
        room_rows = scheduled.budget_rows - len(admitted)
        tokens, rows = limit.tokens - room_tokens, limit.rows - room_rows
        room = min(room_tokens, room_rows, room_rows if self._most_rows is None else self._most_rows)
        others = [self._services[name] for name in leader.companions]
        for state in sorted(others, key=lambda state: state.last_step):
            limit = state.limit
            its_room = min(room, limit.tokens - tokens, limit.rows - rows)
            if not len(state.running) or its_room <= 0 or limit.has_suspects:
                continue
            decodes = self._decodes(state, its_room)
            if decodes is not None:
                found.append(decodes)
                taken = len(decodes.rows)
                tokens, rows, room = tokens + taken, rows + taken, its_room - taken
        return found

    def _decodes(self, state: ServiceState, budget: int) -> CoBatched | None:
        """The first ``budget`` requests of a service, by admission, that decode and lack no block."""
        batch, service = state.running, state.service
        missing = batch.num_tokens_with_in_flight - batch.num_scheduled
        able = (missing == 1) & (batch.prefilling == 0) & (batch.is_ending == 0)
        able &= (batch.num_tokens_with_in_flight < batch.num_final_tokens) & (batch.postponed == 0)
        full = batch.num_scheduled == batch.num_blocks * self._pool.block_size
        # Who is at the end of a slice waits for a turn of its service, which hands out slices.
        rows = (able & (batch.num_tokens_with_in_flight < batch.slice_end)).nonzero()[0]
        growing = rows[full[rows]]
        free = len(growing)
        while free and not self._pool.can_allocate(service, free, evict=False):
            free -= 1
        if free < len(growing):
            rows = np.setdiff1d(rows, growing[free:], assume_unique=True)
        rows = rows[:budget]
        if not len(rows):
            return None
        growth = rows[full[rows]].tolist()
        blocks = self._pool.allocate(service, len(growth)) if growth else []
        assert blocks is not None
        return CoBatched(state, rows, growth, blocks, complete=len(rows) == np.count_nonzero(able))
