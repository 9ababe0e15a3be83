"""Calls that were read and are not submitted yet: their grammars are made ready, or others go first."""

from collections.abc import Callable
from typing import NamedTuple

from shoal.core import Grammar
from shoal.engine import wire
from shoal.execute.grammar.pool import GrammarLease

Prepare = Callable[[str, Grammar, bool], GrammarLease]
"""Keeps a place for the grammar of a service's request, which may have been accepted before."""


class Arrival(NamedTuple):
    """A call to be submitted."""

    message: wire.Submit
    """As it came."""
    lease: GrammarLease | None = None
    """The place of its grammar: to be released when it was submitted."""

    def release(self) -> None:
        """It was submitted, or will not be."""
        if self.lease is not None:
            self.lease.release()


class Arrivals:
    """Calls by the id of their first choice, in the order in which they can be submitted."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._ready: dict[str, Arrival] = {}
        self._preparing: dict[str, Arrival] = {}

    def add(self, message: wire.Submit) -> None:
        """A call has come. Raises InvalidRequest or QueueFull where its grammar gets no place."""
        request = message.request
        grammar = request.sampling.grammar
        if grammar is None:
            self._ready[request.id] = Arrival(message)
        else:
            resumed = any(choice.resume_state is not None for choice in message.choices)
            lease = self._prepare(request.service, grammar, resumed)
            self._preparing[request.id] = Arrival(message, lease)

    def pop(self, request_id: str) -> bool:
        """Forget a call; whether it was here."""
        arrival = self._ready.pop(request_id, None) or self._preparing.pop(request_id, None)
        if arrival is not None:
            arrival.release()
        return arrival is not None

    def clear(self) -> None:
        """Forget all."""
        for request_id in (*self._ready, *self._preparing):
            self.pop(request_id)

    @property
    def preparing(self) -> bool:
        """Whether grammars are being made ready."""
        return bool(self._preparing)

    @property
    def waits(self) -> bool:
        """Whether a call could be submitted, or refused, now."""
        return bool(self._ready) or any(map(_is_prepared, self._preparing.values()))

    def take(self) -> Arrival | None:
        """The next call to be submitted, or refused: its lease then raises why. It is not here any more."""
        for request_id, arrival in list(self._preparing.items()):
            if _is_prepared(arrival):
                self._ready[request_id] = self._preparing.pop(request_id)
        return self._ready.pop(next(iter(self._ready))) if self._ready else None


def _is_prepared(arrival: Arrival) -> bool:
    return arrival.lease is None or arrival.lease.ready.done()
