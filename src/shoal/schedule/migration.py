"""The scheduler's part of a migration: a request leaves or joins the running batch with its block table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.core import InvalidRequest, Request
from shoal.kvcache import BlockPool
from shoal.schedule.leases import Lease
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.service_limits import ServiceLimits
from shoal.schedule.submission import Submitter, resumable_request


class KVTable(NamedTuple):
    """Position of a running request's KV, while no plan is in flight."""

    seq_id: int
    service: str
    blocks: Sequence[int]
    """Its block table."""
    computed: int
    """Leading tokens whose KV is in place."""


class HeldRequest(NamedTuple):
    """A request that was taken out of the running batch."""

    request: Request
    """With its output and resume state, to be submitted to another engine."""
    computed: int
    """Leading tokens whose KV is in its lease."""


class Migrator:
    """Moves requests between the running batch and leases, while no plan is in flight.

    limits: of the services that accept new requests.
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
        """Reserve ``blocks`` (further) blocks if possible without preemption; returns whether it worked."""
        if service not in self._limits:
            return False
        if not self._pool.can_allocate(service, blocks):
            moves = self._pool.compact(service, blocks)
            if moves is None:
                return False
            self._store.apply_compaction(moves)
        further = self._pool.allocate(service, blocks)
        assert further is not None
        lease = self._store.leases.find(key) or Lease(service)
        lease.blocks += further
        self._store.leases.put(key, lease)
        return True

    def table_of(self, request_id: str) -> KVTable | None:
        """None: the request is not running."""
        request = self._store.requests.get(request_id)
        if request is None or request.seq_id < 0:
            return None
        batch = self._store.services[request.service].running
        computed = int(batch.num_computed[batch.row_of(request)])
        return KVTable(request.seq_id, request.service, request.block_ids, computed)

    def hold(self, key: str, request_id: str, now_ns: int) -> HeldRequest | None:
        """Take a running request out, and lease its blocks; None, without effect, if it is not running."""
        if self.table_of(request_id) is None:
            return None
        request = self._store.requests[request_id]
        blocks = list(request.block_ids)
        self._pool.share(request.service, blocks)  # they outlive the request's own references
        self._store.remove(request)
        self._store.leases.put(key, Lease(request.service, blocks, request))
        return HeldRequest(resumable_request(request, now_ns), request.num_computed)

    def join(self, key: str, request: Request, computed: int, now_ns: int) -> RequestState:
        """Run a request with the blocks of a lease as its block table; raises InvalidRequest.

        computed: leading tokens whose KV is in these blocks.
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
        self._start_running(state, self._store.leases.take(key).blocks, now_ns)
        return state

    def resume(self, key: str, request_id: str | None, now_ns: int) -> RequestState | None:
        """Run a held request again, with another id if one is given; None: it waits, as its KV was revoked.

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
        state.num_published = 0  # its blocks are published again, which counts the shared ones
        if lease.blocks:
            self._start_running(state, lease.blocks, now_ns)
            return state
        state.num_lost_tokens = state.num_computed
        state.num_scheduled = state.num_computed = 0
        self._store.wait(state)
        return None

    def _start_running(self, state: RequestState, blocks: list[int], now_ns: int) -> None:
        """Add a request with ``num_computed`` tokens in ``blocks`` to the running batch."""
        missing = state.num_tokens - state.num_computed
        num_needed = -(-state.num_tokens // self._pool.block_size)
        self._pool.free(state.service, blocks[num_needed:])
        state.block_ids = blocks[:num_needed]
        state.num_scheduled = state.num_computed
        state.num_lost_tokens = 0
        state.slice_end = state.num_final_tokens
        self._store.requests[state.request.id] = state
        self._store.run(state, now_ns)
        batch = self._store.services[state.service].running
        batch.prefilling[-1] = missing > 1
