"""How long requests took to go on after their engine died, for the log."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recovery:
    """One death, and the requests that have not gone on since."""

    engine: str
    began_ns: int
    requests: int
    pending: set[str] = field(default_factory=set)


class Recoveries:
    """Counts requests that are resumed, and logs when all of an engine's requests go on again."""

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
            # They count for the death that they wait after now.
            recovery.pending -= pending
        if pending:
            self._pending.append(_Recovery(engine, now_ns, len(pending), pending))
        self._pending = [recovery for recovery in self._pending if recovery.pending]

    def progressed(self, request: str, service: str, now_ns: int) -> None:
        """A request got its first token after it was resumed."""
        self._resumed[service] += 1
        self.ended(request, now_ns)

    def ended(self, request: str, now_ns: int) -> None:
        """A request needs nothing more."""
        for recovery in self._pending:
            if request not in recovery.pending:
                continue
            recovery.pending.discard(request)
            if not recovery.pending:
                _log.info(
                    "engine %s: %s went on within %.0f ms",
                    recovery.engine,
                    _requests(recovery.requests),
                    (now_ns - recovery.began_ns) / 1e6,
                )
        self._pending = [recovery for recovery in self._pending if recovery.pending]


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
