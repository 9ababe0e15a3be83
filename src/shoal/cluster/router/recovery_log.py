"""What became of requests after their engine died, for the log."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recovery:
    """One death, and what became of the requests that the engine had."""

    engine: str
    began_ns: int
    pending: set[str]
    """Those that have neither gone on nor ended since."""
    went_on: Counter[str] = field(default_factory=Counter)
    """How many went on, by the engine that has them now."""
    went_on_ns: int = 0
    """When the last of these did."""
    failed: int = 0
    """How many ended with an error."""
    cancelled: int = 0

    def log(self) -> None:
        """Tell it, once nothing is pending."""
        told = []
        if self.went_on:
            total, took_ms = self.went_on.total(), (self.went_on_ns - self.began_ns) / 1e6
            where = ", ".join(f"{count} on engine {engine}" for engine, count in self.went_on.items())
            told.append(f"{_requests(total)} went on within {took_ms:.0f} ms ({where})")
        if self.failed:
            told.append(f"{_requests(self.failed)} ended with an error")
        if self.cancelled:
            told.append(f"{_requests(self.cancelled)} cancelled meanwhile")
        if told:
            level = logging.WARNING if self.failed else logging.INFO
            _log.log(level, "engine %s: %s", self.engine, "; ".join(told))


class Recoveries:
    """Counts requests that are resumed, and logs what became of an engine's requests once that is known.

    A request that loses several engines one after the other counts for the last of these deaths.
    """

    def __init__(self) -> None:
        self._resumed: Counter[str] = Counter()
        self._pending: list[_Recovery] = []

    @property
    def resumed(self) -> Mapping[str, int]:
        """Requests that went on after the end of an engine, by service."""
        return self._resumed

    def engine_ended(self, engine: str, reason: str, requests: Iterable[str], now_ns: int) -> None:
        """An engine ended while it had ``requests``."""
        pending = set(requests)
        resumed = f"; {_requests(len(pending))} to be resumed" if pending else ""
        _log.warning("engine %s died: %s%s", engine, reason, resumed)
        for recovery in self._pending:
            recovery.pending -= pending
        self._log_complete()
        if pending:
            self._pending.append(_Recovery(engine, now_ns, pending))

    def progressed(self, request: str, service: str, engine: str, now_ns: int) -> None:
        """A request got its first token after it was resumed, from ``engine``."""
        self._resumed[service] += 1
        self.went_on(request, engine, now_ns)

    def went_on(self, request: str, engine: str, now_ns: int) -> None:
        """A request is computed again, or complete."""
        recovery = self._take(request)
        if recovery is not None:
            recovery.went_on[engine] += 1
            recovery.went_on_ns = now_ns
            self._log_complete()

    def failed(self, request: str) -> None:
        """A request ended with an error."""
        recovery = self._take(request)
        if recovery is not None:
            recovery.failed += 1
            self._log_complete()

    def cancelled(self, request: str) -> None:
        """Nobody wants a request any more."""
        recovery = self._take(request)
        if recovery is not None:
            recovery.cancelled += 1
            self._log_complete()

    def _take(self, request: str) -> _Recovery | None:
        """The death after which a request has not gone on, which it is not pending for any more."""
        for recovery in self._pending:
            if request in recovery.pending:
                recovery.pending.discard(request)
                return recovery
        return None

    def _log_complete(self) -> None:
        for recovery in self._pending:
            if not recovery.pending:
                recovery.log()
        self._pending = [recovery for recovery in self._pending if recovery.pending]


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
