"""Token buckets: how much of something may be used in a minute."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Fills at ``per_minute`` and holds as much as that; it starts full.

    What is only known afterwards is taken although it is more than there is; then nothing more is to be had
    until the debt has been paid off. Times are seconds on any clock that only goes forward.
    """

    per_minute: float
    """What comes in a minute, and the most that it holds."""
    _level: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)
    """When the level was that."""

    def __post_init__(self) -> None:
        """Fill it."""
        self._level = self.per_minute

    def wait_s(self, now_s: float) -> float:
        """How long it takes until one can be taken; 0: one can be taken now."""
        self._fill(now_s)
        # Without rounding, a rest of a billionth would become a wait.
        return max(0.0, round((1 - self._level) * 60 / self.per_minute, 6))

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount``, however much there is."""
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
