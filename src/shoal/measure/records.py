"""What a run left behind, as plain values: the input of every table, file and picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, RequestRecord
from shoal.measure.inter_token_latencies import InterTokenLatencies


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(RequestRecord):
    """One request from arrival to end; times are nanoseconds on the run's clock.

    first_token_ns and finish_ns of a request without tokens are its end.
    """

    engine: int
    """Number of the engine that served it last; -1 if it was refused on arrival."""
    finish: str
    """How it ended: "stop", "length", "error", "cancelled", or "refused" on arrival or after a long wait."""
    error: str | None = None
    """Why it ended as "error", "cancelled" or "refused"."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index at the first admission."""
    preemptions: int = 0
    """How often it was preempted."""
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    largest_gap_ns: int = 0
    """Longest time between two of its tokens (MTPOT)."""
    slo: SLO = NO_GOALS
    """Its goals: its own where it has them, else those of its service."""

    @property
    def answered(self) -> bool:
        """Whether it got its whole answer."""
        return self.finish in ("stop", "length")


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one engine after the last step that ended at or before ``time_ns``."""

    time_ns: int
    """Time of the sample on the run's clock."""
    engine: int
    """Number of the engine."""
    waiting: int
    """Waiting requests."""
    running: int
    """Running requests."""
    kv_used: float
    """Share of the pool's blocks held by running requests, 0 to 1."""
    tokens_per_s: float
    """Output tokens per second since the previous sample."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step, or several decode steps of the same requests, for a timeline of the run."""

    engine: int
    """Number of the engine."""
    service: str
    """Service whose requests were computed."""
    start_ns: int
    """When the first step began."""
    end_ns: int
    """When the last step ended."""
    steps: int
    """Number of steps."""
    decodes: int
    """Requests that decode."""
    prefill_tokens: int
    """Prompt tokens computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """What one engine did in the whole run."""

    steps: int
    """Number of steps."""
    decode_steps: int
    """Steps in which at least one request decoded."""
    busy_ns: int
    """Sum of the durations of its steps."""
    kv_used_mean: float
    """Share of the pool in use, mean over steps."""
    kv_used_peak: float
    """Largest share of the pool in use."""
    preemptions: int
    """Preemptions of requests."""
    recomputed_tokens: int
    """Tokens computed again after preemptions."""
    swapped_tokens: int
    """Tokens whose KV was copied to the host."""
    prefill_tokens: int
    """Prompt tokens computed."""
    cached_tokens: int
    """Prompt tokens found in the prefix index."""
    output_tokens: int
    """Tokens generated."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything about one run."""

    title: str
    """Title of tables and reports."""
    requests: Sequence[RequestRow]
    """All requests, in order of their ends."""
    samples: Sequence[Sample]
    """Samples of all engines, by time, then engine."""
    engines: Sequence[EngineTotals]
    """Totals of each engine, by its number."""
    spans: Sequence[StepSpan] = ()
    """Steps for a timeline, empty unless they were asked for."""
    execution_s: Mapping[str, float] = field(default_factory=dict)
    """By service, the execution time that normalised latency divides by; may lack services."""
    inter_token_latencies: Mapping[str, InterTokenLatencies] = field(default_factory=dict)
    """By service, the times between tokens; may lack services."""
    end_ns: int = 0
    """When the last step ended."""
    moves: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """How many moves of running requests ended how, by method (``live``, ``stop`` or ``tokens``), then
    ``done``, ``aborted`` or ``ended`` (the request was over before)."""
    withdrawn: int = 0
    """How many running requests a packer took from their engines, as no engine had room for them any more."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What was run, by name, for the head of a report."""
