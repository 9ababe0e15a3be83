"""Received calls that are not submitted to the engine yet: queued, or their grammars are being compiled."""

from collections.abc import Callable
from typing import NamedTuple

from shoal.core import Grammar
from shoal.engine import wire
from shoal.execute.grammar.pool import GrammarLease

Prepare = Callable[[str, Grammar, bool], GrammarLease]
"""Leases a place for a grammar: service, grammar, and whether the request was accepted before."""


class PendingCall(NamedTuple):
    """A call to be submitted."""

    message: wire.Submit
    lease: GrammarLease | None = None
    """Place of its grammar, released after the submit; None: it has no grammar."""

    def release(self) -> None:
        """Release the lease, after the submit or instead of it."""
        if self.lease is not None:
            self.lease.release()


class PendingCalls:
    """Calls by the id of their first choice, in the order in which they can be submitted."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._ready: dict[str, PendingCall] = {}
        self._preparing: dict[str, PendingCall] = {}

    def add(self, message: wire.Submit) -> None:
        """Queue a call. Raises InvalidRequest or QueueFull where its grammar gets no place."""
        request = message.request
        grammar = request.sampling.grammar
        if grammar is None:
            self._ready[request.id] = PendingCall(message)
        else:
            resumed = any(choice.resume_state is not None for choice in message.choices)
            lease = self._prepare(request.service, grammar, resumed)
            self._preparing[request.id] = PendingCall(message, lease)

    def pop(self, request_id: str) -> bool:
        """Drop a call; returns whether it was pending."""
        call = self._ready.pop(request_id, None) or self._preparing.pop(request_id, None)
        if call is not None:
            call.release()
        return call is not None

    def clear(self) -> None:
        for request_id in (*self._ready, *self._preparing):
            self.pop(request_id)

    @property
    def preparing(self) -> bool:
        """Whether grammars are being compiled."""
        return bool(self._preparing)

    @property
    def ready(self) -> bool:
        """Whether a call can be submitted, or rejected, now."""
        return bool(self._ready) or any(map(_is_ready, self._preparing.values()))

    def pop_ready(self) -> PendingCall | None:
        """Remove and return the next call to submit, or to reject if its lease raises an error."""
        for request_id, call in list(self._preparing.items()):
            if _is_ready(call):
                self._ready[request_id] = self._preparing.pop(request_id)
        return self._ready.pop(next(iter(self._ready))) if self._ready else None


def _is_ready(call: PendingCall) -> bool:
    return call.lease is None or call.lease.ready.done()
