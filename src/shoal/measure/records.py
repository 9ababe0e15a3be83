"""What a run left behind, as plain values: the input of every table, file and picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(RequestRecord):
    """One request from arrival to end; times are nanoseconds on the run's clock.

    engine: number of the engine that served it last (-1: refused at the door). finish: "stop", "length",
    "error", "cancelled" or "refused". error: why, for the last three. cached_tokens: prompt tokens found in
    the prefix index at the first admission. evictions: how often it lost its memory. recomputed_tokens:
    tokens computed again because of that. largest_gap_ns: longest time between two of its tokens (MTPOT).
    slo: its goals, resolved. first_token_ns and finish_ns of a request without tokens are its end.
    """

    engine: int
    finish: str
    error: str | None = None
    cached_tokens: int = 0
    evictions: int = 0
    recomputed_tokens: int = 0
    largest_gap_ns: int = 0
    slo: SLO = NO_GOALS

    @property
    def answered(self) -> bool:
        """Whether it got its whole answer."""
        return self.finish in ("stop", "length")


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one engine after the last step that ended at or before ``time_ns``.

    kv_used: share of the pool's blocks held by running requests, 0 to 1. tokens_per_s: output tokens
    delivered since the sample before, per second.
    """

    time_ns: int
    engine: int
    waiting: int
    running: int
    kv_used: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step, or a run of decode steps of the same requests, for a timeline of the run.

    steps: how many. decodes: rows that decode. prefill_tokens: prompt tokens computed.
    """

    engine: int
    service: str
    start_ns: int
    end_ns: int
    steps: int
    decodes: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """What one engine did in the whole run.

    busy_ns: durations of its steps. kv_used_mean: mean share of the pool in use, over steps. decode_steps:
    steps with at least one decoding row.
    """

    steps: int
    decode_steps: int
    busy_ns: int
    kv_used_mean: float
    kv_used_peak: float
    evictions: int
    recomputed_tokens: int
    swapped_tokens: int
    prefill_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything about one run.

    requests: in order of their ends. samples: by time, then engine. spans: only where they were asked for.
    execution_s: by service, the fixed yardstick of normalised latency; services without one are missing.
    end_ns: when the last step ended. facts: what was run, by name, for the head of a report.
    """

    title: str
    requests: Sequence[RequestRow]
    samples: Sequence[Sample]
    engines: Sequence[EngineTotals]
    spans: Sequence[StepSpan] = ()
    execution_s: Mapping[str, float] = field(default_factory=dict)
    end_ns: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
