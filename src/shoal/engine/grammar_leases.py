"""Places in the grammar pool that unfinished requests of an engine hold."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from shoal.core import Request, TokenEvent
from shoal.execute.grammar.pool import GrammarLease, GrammarPool


class GrammarLeases:
    """The leases of an engine's requests, from their submission to their ends.

    pool: None where the engine follows no grammars; then no request needs a lease.
    """

    def __init__(self, pool: GrammarPool | None) -> None:
        self.pool = pool
        self._leases: dict[str, GrammarLease] = {}

    @contextmanager
    def acquire(self, requests: Sequence[Request]) -> Iterator[None]:
        """Lease places for requests submitted in the body: for all or, where an error is raised, for none.

        Raises as ``GrammarPool.lease`` does.
        """
        leases: dict[str, GrammarLease] = {}
        try:
            for request in requests:
                if self.pool is not None and request.sampling.grammar is not None:
                    leases[request.id] = self.pool.lease(request.service, request.sampling.grammar)
            yield
        except BaseException:
            for lease in leases.values():
                lease.release()
            raise
        self._leases |= leases

    def release(self, request_id: str) -> None:
        """Release the lease of a request; unknown ids are ignored."""
        if (lease := self._leases.pop(request_id, None)) is not None:
            lease.release()

    def release_ended(self, events: Iterable[TokenEvent]) -> None:
        if self._leases:
            for event in events:
                if event.finish is not None:
                    self.release(event.request_id)
