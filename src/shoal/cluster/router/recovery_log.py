"""Log lines about requests after the death of their engine: resumed, failed or cancelled."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recovery:
    """One engine death and its requests."""

    engine: str
    began_ns: int
    pending: set[str]
    """Requests that have neither resumed nor ended since."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Resumed requests, by their new engine."""
    went_on_ns: int = 0
    """When the last of them resumed."""
    failed: int = 0
    cancelled: int = 0

    def log(self) -> None:
        parts = []
        if self.resumed:
            total, took_ms = self.resumed.total(), (self.went_on_ns - self.began_ns) / 1e6
            where = ", ".join(f"{count} on engine {engine}" for engine, count in self.resumed.items())
            parts.append(f"{_requests(total)} went on within {took_ms:.0f} ms ({where})")
        if self.failed:
            parts.append(f"{_requests(self.failed)} ended with an error")
        if self.cancelled:
            parts.append(f"{_requests(self.cancelled)} cancelled meanwhile")
        if parts:
            level = logging.WARNING if self.failed else logging.INFO
            _log.log(level, "engine %s: %s", self.engine, "; ".join(parts))


class RecoveryLog:
    """Counts resumed requests, and logs the outcome of a death once all its requests have resumed or ended.

    A request that loses several engines counts for the last of these deaths.
    """

    def __init__(self) -> None:
        self._resumed: Counter[str] = Counter()
        self._pending: list[_Recovery] = []

    @property
    def resumed(self) -> Mapping[str, int]:
        """Number of requests resumed after the end of an engine, by service."""
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
        """A resumed request got its first token, from ``engine``."""
        self._resumed[service] += 1
        self.recovered(request, engine, now_ns)

    def recovered(self, request: str, engine: str, now_ns: int) -> None:
        """A request has resumed, or is complete."""
        recovery = self._take(request)
        if recovery is not None:
            recovery.resumed[engine] += 1
            recovery.went_on_ns = now_ns
            self._log_complete()

    def failed(self, request: str) -> None:
        recovery = self._take(request)
        if recovery is not None:
            recovery.failed += 1
            self._log_complete()

    def cancelled(self, request: str) -> None:
        recovery = self._take(request)
        if recovery is not None:
            recovery.cancelled += 1
            self._log_complete()

    def _take(self, request: str) -> _Recovery | None:
        """Remove a request from the death for which it is pending, and return that."""
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
