"""User options of the scheduler: policies, preemption, starvation, token gaps, SLO handling, batch limits."""

from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.core import ConfigError, lookup
from shoal.forecast import PREDICTORS
from shoal.schedule.policies.admissions import Admission, Aggressive
from shoal.schedule.policies.orders import Order, WeightedTurns
from shoal.schedule.policies.victims import VICTIMS

PREEMPT_FOR_WAITING = ("never", "gain", "less-urgent")
"""Values of ``preempt_for_waiting``."""

DECODE_SHARE = 4
"""Without ``max_running``, at most ``max_batched_tokens / DECODE_SHARE`` requests run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of one engine's scheduler; every combination works."""

    order: Order = field(default_factory=WeightedTurns)
    """Which service steps next, and the priorities of its requests."""
    admission: Admission = field(default_factory=Aggressive)
    """Whether there is enough memory for one more request."""
    victim: str = "lowest-priority"
    """Which request is preempted when a running request needs a block and none is free; in ``VICTIMS``."""
    preemption_mode: Literal["recompute", "swap"] = "swap"
    """KV of a preempted request: "recompute" drops it, "swap" saves it in host memory."""
    preempt_for_waiting: Literal["never", "gain", "less-urgent"] = "gain"
    """Whether a waiting request may preempt running requests of lower priority: never, only if it gains more
    than they lose, or always."""
    lengths: str = "history"
    """Predictor of output lengths for the ``shortest-remaining`` order and the ``predicted`` admission; in
    ``PREDICTORS``."""
    starvation_s: float = 10.0
    """A request without a step for this long goes first, regardless of the order."""
    max_token_gap_s: float = 1.0
    """Bound on the inter-token latency: a service whose oldest stream would exceed it steps first; and while
    any request streams, prompts are computed in chunks that take at most half of it."""
    on_hopeless: Literal["serve", "last", "refuse"] = "serve"
    """For waiting requests whose latency goals can no longer be met: "serve" changes nothing, "last" puts
    them behind all other requests of the service, "refuse" ends them, or puts them last if they have
    output."""
    max_running: int | None = None
    """Limit on requests that hold KV at once, over all services; None: see ``resolve_max_running``."""
    max_batched_tokens: int = 2048
    """Token budget of a step."""
    depth: int | None = None
    """Limit on plans in flight, 1 or 2; with 2 the next step is scheduled while one is computed. None: see
    ``with_depth_for``."""
    max_iterations: int = 1
    """Limit on decode steps in one plan, made while nothing but decoding can come next. The plan ends early
    with the step in which a request ends or arrives."""
    co_batch: bool = True
    """Whether services on the same weights decode in each other's steps (merged layout only)."""
    co_batch_rows: int | None = None
    """Limit on decodes of other services in a step; None: the rest of ``max_batched_tokens``."""

    def __post_init__(self) -> None:
        """Raises ConfigError for unknown names and numbers out of range."""
        lookup("scheduler victim", VICTIMS, self.victim)
        lookup("scheduler lengths", PREDICTORS, self.lengths)
        if self.preemption_mode not in ("recompute", "swap"):
            raise ConfigError(
                f"scheduler preemption_mode can be recompute or swap, got {self.preemption_mode!r}"
            )
        if self.on_hopeless not in ("serve", "last", "refuse"):
            raise ConfigError(f"scheduler on_hopeless can be serve, last or refuse, got {self.on_hopeless!r}")
        if self.preempt_for_waiting not in PREEMPT_FOR_WAITING:
            raise ConfigError(
                f"scheduler preempt_for_waiting can be {', '.join(PREEMPT_FOR_WAITING)}, got"
                f" {self.preempt_for_waiting!r}"
            )
        for name in ("starvation_s", "max_token_gap_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"scheduler {name.removesuffix('_s')} must be above 0 seconds, got {getattr(self, name)}"
                )
        for name in ("max_running", "max_batched_tokens", "max_iterations", "co_batch_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"scheduler {name} must be at least 1, got {value}")
        if self.depth not in (None, 1, 2):
            raise ConfigError(f"scheduler depth must be 1 or 2 plans in flight, got {self.depth}")
        if self.max_iterations > 1 and self.max_in_flight > 1:
            raise ConfigError(
                f"scheduler max_iterations {self.max_iterations} needs depth 1: with depth {self.depth} the"
                " next plan is made before it is known after how many iterations this one stops;"
                " set depth to 1, or max_iterations to 1"
            )

    @property
    def max_in_flight(self) -> int:
        """Limit on plans in flight: ``depth``, or 1."""
        return self.depth or 1

    def with_depth_for(self, device: str) -> "SchedulerOptions":
        """The same options with a depth: by default 2 on a GPU, which else waits while a step is scheduled,
        and 1 on a CPU, where both use the same cores."""
        overlaps = device != "cpu" and self.max_iterations == 1
        return replace(self, depth=self.depth or (2 if overlaps else 1))

    def resolve_max_running(self, blocks: int) -> int:
        """The limit on running requests, for a pool with ``blocks`` blocks for one service.

        Without ``max_running``, the number of slots is limited only by memory (each request holds a block)
        and by the token budget, most of which is left to prompts.
        """
        if self.max_running is not None:
            return self.max_running
        return max(1, min(blocks, self.max_batched_tokens // DECODE_SHARE))
