"""What a user can choose about the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.core import ConfigError, lookup
from shoal.forecast import PREDICTORS
from shoal.schedule.admissions import Admission, Aggressive
from shoal.schedule.orders import Order, WeightedTurns
from shoal.schedule.victims import VICTIMS


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
    preempt_for_waiting: bool = True
    """Whether a waiting request may preempt running ones that the order finds less urgent."""
    lengths: str = "history"
    """Which predictor of output lengths the ``shortest-remaining`` order and the ``predicted`` admission use;
    in ``PREDICTORS``."""
    starvation_s: float = 10.0
    """A request that took part in no step for so long goes first, whatever the order says."""
    max_running: int = 256
    """Most requests that hold KV at once, over all services."""
    max_batched_tokens: int = 2048
    """Most tokens that one step computes."""
    depth: int = 1
    """Most plans in flight; 2 lets the next step be scheduled while one is computed."""
    max_iterations: int = 1
    """Most decode steps made under one decision, where nothing but decoding can come next. They end early
    with the step in which a request ends or arrives."""

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers without meaning; raises ConfigError."""
        lookup("scheduler victim", VICTIMS, self.victim)
        lookup("scheduler lengths", PREDICTORS, self.lengths)
        if self.preemption_mode not in ("recompute", "swap"):
            raise ConfigError(
                f"scheduler preemption_mode can be recompute or swap, got {self.preemption_mode!r}"
            )
        if not self.starvation_s > 0:
            raise ConfigError(f"scheduler starvation must be above 0 seconds, got {self.starvation_s}")
        for name in ("max_running", "max_batched_tokens", "max_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler {name} must be at least 1, got {getattr(self, name)}")
        if self.depth not in (1, 2):
            raise ConfigError(f"scheduler depth must be 1 or 2 plans in flight, got {self.depth}")
        if self.max_iterations > 1 and self.depth > 1:
            raise ConfigError(
                f"scheduler max_iterations {self.max_iterations} needs depth 1: with depth {self.depth} the"
                " next plan is made before anybody knows after how many iterations this one stops;"
                " set depth to 1, or max_iterations to 1"
            )
