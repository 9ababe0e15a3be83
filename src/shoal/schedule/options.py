"""What a user can choose about the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.core import ConfigError, lookup
from shoal.forecast import PREDICTORS
from shoal.schedule.policies.admissions import Admission, Aggressive
from shoal.schedule.policies.orders import Order, WeightedTurns
from shoal.schedule.policies.victims import VICTIMS

PREEMPT_FOR_WAITING = ("never", "gain", "less-urgent")
"""Values of ``preempt_for_waiting``."""

DECODE_SHARE = 4
"""Unless ``max_running`` is written, decodes take at most one of so many tokens of a full step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of one engine's scheduler; every combination works."""

    order: Order = field(default_factory=WeightedTurns)
    """Which service steps next, and who comes first in it."""
    admission: Admission = field(default_factory=Aggressive)
    """Whether the memory suffices for one more request."""
    victim: str = "lowest-priority"
    """Who is preempted when a running request needs a block and none is free; in ``VICTIMS``."""
    preemption_mode: Literal["recompute", "swap"] = "swap"
    """What becomes of a preempted request's KV: "recompute" drops it, "swap" saves it in host memory."""
    preempt_for_waiting: Literal["never", "gain", "less-urgent"] = "gain"
    """Whether a waiting request may preempt running ones that the order finds less urgent: always, or only
    where it gains more than they lose."""
    lengths: str = "history"
    """Which predictor of output lengths the ``shortest-remaining`` order and the ``predicted`` admission use;
    in ``PREDICTORS``."""
    starvation_s: float = 10.0
    """A request that took part in no step for so long goes first, whatever the order says."""
    max_token_gap_s: float = 1.0
    """Where services take turns, one whose oldest stream would go without a token for longer steps first; and
    while anybody streams, prompts come in chunks that take half of it."""
    on_hopeless: Literal["serve", "last", "refuse"] = "serve"
    """What becomes of a waiting request whose latency goals are out of reach: "serve" treats it as any other,
    "last" puts it behind all others of its service, "refuse" ends it, or puts it last if it has a token."""
    max_running: int | None = None
    """Most requests that hold KV at once, over all services; None: see ``resolve_max_running``."""
    max_batched_tokens: int = 2048
    """Most tokens that one step computes."""
    depth: int = 1
    """Most plans in flight; 2 lets the next step be scheduled while one is computed."""
    max_iterations: int = 1
    """Most decode steps made under one decision, where nothing but decoding can come next. They end early
    with the step in which a request ends or arrives."""
    co_batch: bool = True
    """Whether services on the same weights decode in each other's steps; in the merged layout."""
    co_batch_rows: int | None = None
    """Most decodes of other services in a step; None: as many as ``max_batched_tokens`` leaves room for."""

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers without meaning; raises ConfigError."""
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
        if self.depth not in (1, 2):
            raise ConfigError(f"scheduler depth must be 1 or 2 plans in flight, got {self.depth}")
        if self.max_iterations > 1 and self.depth > 1:
            raise ConfigError(
                f"scheduler max_iterations {self.max_iterations} needs depth 1: with depth {self.depth} the"
                " next plan is made before anybody knows after how many iterations this one stops;"
                " set depth to 1, or max_iterations to 1"
            )

    def resolve_max_running(self, blocks: int) -> int:
        """Most requests at once on a pool that has so many blocks for one service.

        Unless it is written, slots are no limit before memory or step time is one: each request holds a
        block, and decodes leave most of a step's tokens to prompts.
        """
        if self.max_running is not None:
            return self.max_running
        return max(1, min(blocks, self.max_batched_tokens // DECODE_SHARE))
