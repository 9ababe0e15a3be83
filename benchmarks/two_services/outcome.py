"""Results of a run of `benchmarks.two_services`: token times per request, counts per service."""

from dataclasses import dataclass

from shoal.measure import InterTokenLatencies


@dataclass
class Outcome:
    """Times of one request, in seconds from the start of the run.

    first_s, last_s: of the first and the newest token; finish_s: of the last. None if the run ended before.
    largest_gap_s: the largest inter-token latency.
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
        """Record tokens; returns the time since the previous ones, None for the first."""
        gap_s = None if self.last_s is None else now_s - self.last_s
        if self.first_s is None:
            self.first_s = now_s
        self.output_tokens += tokens
        self.last_s = now_s
        self.largest_gap_s = max(self.largest_gap_s, gap_s or 0.0)
        return gap_s

    def break_off(self, now_s: float) -> None:
        """End of the run: a running request counts the time since its newest token."""
        if self.finish_s is None and self.last_s is not None:
            self.largest_gap_s = max(self.largest_gap_s, now_s - self.last_s)


@dataclass(frozen=True)
class Counts:
    """Repeated work of one service."""

    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int


@dataclass(frozen=True)
class Run:
    """One policy under one workload.

    outcomes: of requests after the warm-up. gaps: inter-token latencies by service. ended_s: length of the
    run.
    """

    outcomes: list[Outcome]
    gaps: dict[str, InterTokenLatencies]
    counts: dict[str, Counts]
    ended_s: float
