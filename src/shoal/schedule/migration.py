"""Requests that change engines with their KV: they leave and enter the running batch with a block table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.core import InvalidRequest, Request
from shoal.kvcache import BlockPool
from shoal.schedule.leases import Lease
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.submission import Submitter, resumable_request
from shoal.schedule.validation import ServiceLimits


class KVTable(NamedTuple):
    """Where the KV of a running request lies, while no plan is in flight."""

    seq_id: int
    """Names its present stay in the running batch."""
    service: str
    """Whose blocks they are."""
    blocks: Sequence[int]
    """Its block table."""
    computed: int
    """Leading tokens whose KV is in place."""


class HeldRequest(NamedTuple):
    """A request that was taken out of the running batch."""

    request: Request
    """With its output, and what was counted: to be committed elsewhere."""
    computed: int
    """Leading tokens whose KV is in its lease."""


class Mover:
    """Moves requests between the running batch and leases; asked while no plan is in flight.

    limits: of the services that take new requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: RequestStore,
        submitter: Submitter,
        limits: Mapping[str, ServiceLimits],
    ) -> None:
        self._pool = pool
        self._store = store
        self._submitter = submitter
        self._limits = limits

    def lease(self, key: str, service: str, blocks: int) -> bool:
        """Keep so many blocks, or so many more, if they can be had without preempting anybody."""
        if service not in self._limits:
            return False
        if not self._pool.can_allocate(service, blocks):
            moves = self._pool.compact(service, blocks)
            if moves is None:
                return False
            self._store.compacted(moves)
        further = self._pool.allocate(service, blocks)
        assert further is not None
        lease = self._store.leases.find(key) or Lease(service)
        lease.blocks += further
        self._store.leases.put(key, lease)
        return True

    def table_of(self, request_id: str) -> KVTable | None:
        """Where its KV lies; None: it does not run."""
        request = self._store.requests.get(request_id)
        if request is None or request.seq_id < 0:
            return None
        batch = self._store.services[request.service].running
        computed = int(batch.num_computed[batch.row_of(request)])
        return KVTable(request.seq_id, request.service, request.block_ids, computed)

    def hold(self, key: str, request_id: str, now_ns: int) -> HeldRequest | None:
        """Take a running request out, and keep its blocks; None, and nothing changes: it does not run."""
        if self.table_of(request_id) is None:
            return None
        request = self._store.requests[request_id]
        blocks = list(request.block_ids)
        self._pool.share(request.service, blocks)  # so that they stay when the request goes
        self._store.remove(request)
        self._store.leases.put(key, Lease(request.service, blocks, request))
        return HeldRequest(resumable_request(request, now_ns), request.num_computed)

    def join(self, key: str, request: Request, computed: int, now_ns: int) -> RequestState:
        """The blocks of a lease are the table of a request, which runs; raises InvalidRequest.

        computed: leading tokens whose KV lies there.
        """
        lease = self._store.leases.find(key)
        if lease is None or lease.service != request.service or lease.held is not None:
            raise InvalidRequest(f"no room is kept for request {request.id!r}")
        state = self._submitter.new_state(request, now_ns)
        if not 0 <= computed < state.num_tokens or computed > len(lease.blocks) * self._pool.block_size:
            raise InvalidRequest(
                f"{computed} tokens cannot be computed of {state.num_tokens}, with {len(lease.blocks)} blocks"
            )
        state.num_computed = computed
        self._run(state, self._store.leases.take(key).blocks, now_ns)
        return state

    def resume(self, key: str, request_id: str | None, now_ns: int) -> RequestState | None:
        """A held request runs again, under another id if one is given; None: it waits, as its KV is gone.

        Raises InvalidRequest if the id is in use.
        """
        lease = self._store.leases.find(key)
        assert lease is not None
        state = lease.held
        assert state is not None
        if request_id is None:
            request_id = state.request.id
        if request_id in self._store.requests:
            raise InvalidRequest(f"request id {request_id!r} is in use by an unfinished request", param="id")
        self._store.leases.take(key)
        state.request = replace(state.request, id=request_id)
        state.finished = False
        state.num_published = 0  # its blocks are offered again, so that others are known to share them
        if lease.blocks:
            self._run(state, lease.blocks, now_ns)
            return state
        state.num_lost_tokens = state.num_computed
        state.num_scheduled = state.num_computed = 0
        self._store.wait(state)
        return None

    def _run(self, state: RequestState, blocks: list[int], now_ns: int) -> None:
        """A state of which ``num_computed`` tokens lie in ``blocks`` runs from now on."""
        most = -(-state.num_tokens // self._pool.block_size)
        self._pool.free(state.service, blocks[most:])
        state.block_ids = blocks[:most]
        state.num_scheduled = state.num_computed
        state.num_lost_tokens = 0
        state.slice_end = state.num_final_tokens
        self._store.requests[state.request.id] = state
        self._store.run(state, now_ns)
        batch = self._store.services[state.service].running
        batch.prefilling[-1] = state.num_tokens - state.num_computed > 1
