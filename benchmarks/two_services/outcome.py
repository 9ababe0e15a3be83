"""What a run of `two_services.py` leaves behind."""

from dataclasses import dataclass

from shoal.measure import InterTokenLatencies


@dataclass
class Outcome:
    """What became of one request, in seconds from the start of the run.

    first_s: of its first token, last_s: of its newest, finish_s: of its last; None where the run ended
    before. largest_gap_s: the longest time between two tokens.
    """

    service: str
    at_s: float
    prompt_tokens: int
    output_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish_s: float | None = None
    largest_gap_s: float = 0.0

    def receive(self, tokens: int, now_s: float) -> float | None:
        """Note tokens that come together; the time since those before, None where these are the first."""
        gap_s = None if self.last_s is None else now_s - self.last_s
        if self.first_s is None:
            self.first_s = now_s
        self.output_tokens += tokens
        self.last_s = now_s
        self.largest_gap_s = max(self.largest_gap_s, gap_s or 0.0)
        return gap_s

    def break_off(self, now_s: float) -> None:
        """The run is over: who waits for a token has waited until now."""
        if self.finish_s is None and self.last_s is not None:
            self.largest_gap_s = max(self.largest_gap_s, now_s - self.last_s)


@dataclass(frozen=True)
class Counts:
    """What one service's engine had to do twice."""

    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int


@dataclass(frozen=True)
class Run:
    """One policy under one workload.

    outcomes: of requests after the warm-up. gaps: of each service, the times between their tokens. ended_s:
    when it was over, in seconds from its start.
    """

    outcomes: list[Outcome]
    gaps: dict[str, InterTokenLatencies]
    counts: dict[str, Counts]
    ended_s: float
