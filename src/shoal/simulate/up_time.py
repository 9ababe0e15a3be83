"""How long an engine ran, over all its starts."""

from dataclasses import dataclass


@dataclass(slots=True)
class UpTime:
    """The time from each start to its end; the first start is at 0."""

    _ended_ns: int = 0
    """Total of the times that have ended."""
    _since_ns: int | None = 0
    """Its last start; None: it does not run."""

    def start(self, now_ns: int) -> None:
        if self._since_ns is None:
            self._since_ns = now_ns

    def end(self, now_ns: int) -> None:
        self._ended_ns = self.total_ns(now_ns)
        self._since_ns = None

    def total_ns(self, now_ns: int) -> int:
        """The total up to now."""
        return self._ended_ns + (0 if self._since_ns is None else now_ns - self._since_ns)
