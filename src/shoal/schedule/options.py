"""What a user can choose about the scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.core import ConfigError, lookup
from shoal.forecast import PREDICTORS
from shoal.schedule.admission import Admission, Aggressive
from shoal.schedule.orders import Order, WeightedTurns
from shoal.schedule.victims import VICTIMS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of one engine's scheduler; every combination works.

    order: which service steps next, and who comes first in it.
    admission: whether the memory suffices for one more request.
    victim: who gives up its blocks when a running request needs one and none is free; in ``VICTIMS``.
    eviction: what becomes of a victim's KV: "recompute" drops it, "swap" saves it in host memory.
    preempt: whether a waiting request may evict running ones that the order finds less urgent.
    lengths: which belief about output lengths the ``shortest-remaining`` order and the ``predicted``
        admission take; in ``PREDICTORS``.
    starvation_s: a request that took part in no step for so long goes first, whatever the order says.
    max_running: most requests that hold KV at once, over all services.
    max_batched_tokens: most tokens that one step computes.
    depth: most plans in flight; 2 lets the next step be scheduled while one is computed.
    """

    order: Order = field(default_factory=WeightedTurns)
    admission: Admission = field(default_factory=Aggressive)
    victim: str = "lowest-priority"
    eviction: Literal["recompute", "swap"] = "swap"
    preempt: bool = True
    lengths: str = "history"
    starvation_s: float = 10.0
    max_running: int = 256
    max_batched_tokens: int = 2048
    depth: int = 1

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers without meaning; raises ConfigError."""
        lookup("scheduler victim", VICTIMS, self.victim)
        lookup("scheduler lengths", PREDICTORS, self.lengths)
        if self.eviction not in ("recompute", "swap"):
            raise ConfigError(f"scheduler eviction can be recompute or swap, got {self.eviction!r}")
        if not self.starvation_s > 0:
            raise ConfigError(f"scheduler starvation must be above 0 seconds, got {self.starvation_s}")
        for name in ("max_running", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler {name} must be at least 1, got {getattr(self, name)}")
        if self.depth not in (1, 2):
            raise ConfigError(f"scheduler depth must be 1 or 2 plans in flight, got {self.depth}")
