"""Co-batching: decodes of services on the same weights are added to each other's steps.

The service whose turn it is leads: its rows and blocks come first, as if it were alone. The other services
add decodes only, and take free blocks only: nothing is admitted, preempted, evicted or moved for them.
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
    """Decodes of one service for a step that another service leads."""

    state: ServiceState
    rows: IntArray
    """Rows in the service's running batch."""
    growing: Sequence[int]
    """Rows that get one block each."""
    blocks: Sequence[int]
    """These blocks, allocated."""
    complete: bool
    """Whether all decodes of the service are included."""


class CoBatcher:
    """Finds decodes that may join the step of another service."""

    def __init__(
        self, pool: BlockPool, services: Mapping[str, ServiceState], options: SchedulerOptions
    ) -> None:
        self._pool = pool
        self._services = services
        self._max_rows = options.co_batch_rows

    def form(
        self, leader: ServiceState, scheduled: ScheduledBatch, admitted: Sequence[Admitted]
    ) -> list[CoBatched]:
        """Decodes for a step of ``leader``, whose own blocks are allocated already; allocates their blocks.

        scheduled, admitted: the leader's part. Services with the longest time since their last step come
        first. Services with suspects of a failed step are left out.
        """
        found: list[CoBatched] = []
        limit = leader.limit
        if limit.has_suspects:
            return found
        room_tokens = scheduled.budget - sum([new.num_new_tokens for new in admitted])
        room_rows = scheduled.budget_rows - len(admitted)
        tokens, rows = limit.tokens - room_tokens, limit.rows - room_rows
        room = min(room_tokens, room_rows, room_rows if self._max_rows is None else self._max_rows)
        others = [self._services[name] for name in leader.companions]
        for state in sorted(others, key=lambda state: state.last_step):
            limit = state.limit
            service_room = min(room, limit.tokens - tokens, limit.rows - rows)
            if not len(state.running) or service_room <= 0 or limit.has_suspects:
                continue
            decodes = self._select_decodes(state, service_room)
            if decodes is not None:
                found.append(decodes)
                taken = len(decodes.rows)
                tokens, rows, room = tokens + taken, rows + taken, service_room - taken
        return found

    def _select_decodes(self, state: ServiceState, budget: int) -> CoBatched | None:
        """Up to ``budget`` decodes of a service, by admission, that need no block or get a free one."""
        batch, service = state.running, state.service
        missing = batch.num_tokens_with_in_flight - batch.num_scheduled
        eligible = (missing == 1) & (batch.prefilling == 0) & (batch.is_ending == 0)
        eligible &= (batch.num_tokens_with_in_flight < batch.num_final_tokens) & (batch.postponed == 0)
        full = batch.num_scheduled == batch.num_blocks * self._pool.block_size
        # A request at the end of its slice waits for a turn of its own service.
        rows = (eligible & (batch.num_tokens_with_in_flight < batch.slice_end)).nonzero()[0]
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
        return CoBatched(state, rows, growth, blocks, complete=len(rows) == np.count_nonzero(eligible))
