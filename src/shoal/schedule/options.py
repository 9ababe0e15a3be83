"""What a user can choose about the scheduler."""

from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.schedule.admission import Admission, PastFuture
from shoal.schedule.lookup import lookup
from shoal.schedule.orders import ORDERS
from shoal.schedule.victims import VICTIMS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of one engine's scheduler.

    order: which service steps next, and who comes first in it; a name in ``ORDERS``.
    admission: whether the memory suffices for one more request.
    victim: who loses its KV when a running request needs a block and none is free; in ``VICTIMS``.
    max_running: most requests that hold KV at once, over all services.
    max_batched_tokens: most tokens that one step computes.
    depth: most plans in flight; 2 lets the next step be scheduled while one is computed.
    """

    order: str = "fcfs"
    admission: Admission = field(default_factory=PastFuture)
    victim: str = "newest"
    max_running: int = 256
    max_batched_tokens: int = 2048
    depth: int = 1

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers without meaning; raises ConfigError."""
        lookup("scheduler order", ORDERS, self.order)
        lookup("scheduler victim", VICTIMS, self.victim)
        for name in ("max_running", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler {name} must be at least 1, got {getattr(self, name)}")
        if self.depth not in (1, 2):
            raise ConfigError(f"scheduler depth must be 1 or 2 plans in flight, got {self.depth}")
