"""Deadlines of the tokens of a stream, from its goals for the first token and for each further one."""

from dataclasses import dataclass

from shoal.core.service import SLO


@dataclass(frozen=True, slots=True)
class TokenDeadlines:
    """Token i of a request, from 0, is due at its arrival + ``ttft_s`` + i x ``tpot_s``.

    Tokens that come early make up for later ones: a reader who takes a token every ``tpot_s`` never waits.
    """

    arrival_ns: int
    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, slo: SLO, arrival_ns: int) -> "TokenDeadlines | None":
        """Those of a request with resolved goals; None unless it has both."""
        if slo.ttft_s is None or slo.tpot_s is None:
            return None
        return cls(arrival_ns, slo.ttft_s, slo.tpot_s)

    def due_ns(self, number: int) -> int:
        """When token ``number`` is due."""
        return self.arrival_ns + round((self.ttft_s + number * self.tpot_s) * 1e9)

    def num_on_time(self, first: int, count: int, now_ns: int) -> int:
        """How many of ``count`` tokens that come now, from token ``first`` on, are on time."""
        return sum(now_ns <= self.due_ns(number) for number in range(first, first + count))
