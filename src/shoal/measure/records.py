"""Records of a run as plain values: requests, samples, steps, engine totals. Input of all results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, RequestRecord
from shoal.measure.inter_token_latencies import InterTokenLatencies


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(RequestRecord):
    """One request from arrival to end; times are nanoseconds on the run's clock.

    Without tokens, first_token_ns and finish_ns are the end of the request.
    """

    engine: int
    """Number of the engine that served it last; -1 if refused on arrival."""
    finish: str
    """"stop", "length", "error", "cancelled", or "refused" (on arrival or after a long wait)."""
    error: str | None = None
    """Reason of "error", "cancelled" or "refused"."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    slo: SLO = NO_GOALS
    """Goals of the request; those that it lacks are its service's."""
    tokens_on_time: int | None = None
    """Output tokens within their deadlines (``TokenDeadlines``); None: it has none, or nobody counted."""

    @property
    def answered(self) -> bool:
        """Whether the response is complete."""
        return self.finish in ("stop", "length")


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """The part of one service in a ``Sample``."""

    waiting: int
    """Waiting requests, preempted ones included."""
    running: int
    """Running requests."""
    kv_used: float
    """Share of the engine's pool held by its running requests, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one engine after the last step that ended at or before ``time_ns``."""

    time_ns: int
    """On the run's clock."""
    engine: int
    waiting: int
    """Waiting requests."""
    running: int
    """Running requests."""
    kv_used: float
    """Share of the pool's blocks held by running requests, 0 to 1."""
    tokens_per_s: float
    """Output tokens per second since the previous sample."""
    services: Mapping[str, ServiceSample] = field(default_factory=dict)
    """By service, without those that have nothing; empty if they were not told apart."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an engine, once or several times within one interval of its samples."""

    time_ns: int
    """Of the first time, on the run's clock."""
    engine: int
    kind: str
    """"preempted" (a request), "moved" (a request came from another engine), "died" or "drained"."""
    count: int = 1
    """How many times."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step, or several consecutive decode steps of the same batch, for a timeline of the run."""

    engine: int
    service: str
    start_ns: int
    end_ns: int
    steps: int
    decodes: int
    """Requests that decode."""
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsTotals:
    """Totals of the weights of one service, or of several that share them, over the run."""

    services: tuple[str, ...]
    num_bytes: int
    """Size on each device."""
    fetches: int
    evictions: int
    fetching_s: float
    """Total duration of the fetches."""
    waits: int
    """How often a request waited for the weights, until they came."""
    waiting_s: float
    """Total duration of these waits."""
    longest_wait_s: float

    def __add__(self, other: "WeightsTotals") -> "WeightsTotals":
        """Totals of the same weights on two engines."""
        return WeightsTotals(
            services=tuple(dict.fromkeys((*self.services, *other.services))),
            num_bytes=max(self.num_bytes, other.num_bytes),
            fetches=self.fetches + other.fetches,
            evictions=self.evictions + other.evictions,
            fetching_s=self.fetching_s + other.fetching_s,
            waits=self.waits + other.waits,
            waiting_s=self.waiting_s + other.waiting_s,
            longest_wait_s=max(self.longest_wait_s, other.longest_wait_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """Totals of one engine over the run."""

    steps: int
    decode_steps: int
    """Steps in which at least one request decoded."""
    busy_ns: int
    """Sum of the durations of its steps."""
    kv_used_mean: float
    """Share of the pool in use, mean over steps."""
    kv_used_peak: float
    """Largest share of the pool in use."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again after preemptions."""
    swapped_tokens: int
    """Tokens swapped out to the host."""
    prefill_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    weights: Mapping[str, WeightsTotals] = field(default_factory=dict)
    """By name of the weights; empty if all stay in the device's memory."""
    max_running: int | None = None
    """Limit on its running requests; None: not recorded."""
    up: float | None = None
    """Share of the run in which it ran or loaded; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All records of one run."""

    title: str
    """Title of tables and files."""
    requests: Sequence[RequestRow]
    """In order of their ends."""
    samples: Sequence[Sample]
    """By time, then engine."""
    engines: Sequence[EngineTotals]
    """By number of the engine."""
    spans: Sequence[StepSpan] = ()
    """Steps for a timeline; empty unless requested."""
    execution_s: Mapping[str, float] = field(default_factory=dict)
    """Execution time by service, the divisor of normalised latency; may lack services."""
    inter_token_latencies: Mapping[str, InterTokenLatencies] = field(default_factory=dict)
    """By service; may lack services."""
    end_ns: int = 0
    """End of the last step."""
    moves: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Migrations of running requests by method (``live``, ``stop`` or ``tokens``), then outcome: ``done``,
    ``aborted`` or ``ended`` (the request ended first)."""
    withdrawn: int = 0
    """Running requests that a packer removed from their engines, because no engine had memory for them."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Description of the run, by name, for the head of a report."""
    subject: str = ""
    """Models, devices and load in a few words, the title of a report; "": not known."""
    clients: int | None = None
    """Closed loop: number of clients, which wait for their answers; None: requests come at their times."""
    stopped: bool = False
    """Whether the run was ended early; then only requests that had ended are recorded."""
    events: Sequence[Event] = ()
    """By time, then engine."""
