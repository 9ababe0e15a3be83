"""Read-only view of services for policies: queues, running requests, step counters, learned statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.forecast import LengthDistribution
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import RequestTable


@dataclass(frozen=True, slots=True)
class ServiceTraits:
    """Statistics and options of a service, for orders."""

    mean_s: float
    """Mean execution time of its requests (total duration of their steps), learned online."""
    deviation_s: float
    """Standard deviation of the execution times."""
    mean_output_tokens: float | None = None
    """Of its finished requests; None before the first."""
    quota: int = 8
    """Consecutive decode steps, for round robin."""
    alone_s: float | None = None
    """Execution time of the mean request when it runs alone; None: unknown."""


class ServiceView(Protocol):
    @property
    def service(self) -> str: ...

    @property
    def weight_bytes(self) -> int:
        """Size of its weights; 0: unknown."""
        ...

    @property
    def waiting(self) -> Sequence[RequestState]:
        """Requests without KV, by the order's rank, then by arrival."""
        ...

    @property
    def running(self) -> RequestTable:
        """Requests with KV, longest admitted first."""
        ...

    @property
    def last_step(self) -> int:
        """Number of the last step that was its turn, or that included all its decodes; -1: none yet."""
        ...

    @property
    def last_turn(self) -> int:
        """Number of the last step that it led, unlike co-batched steps of other services; -1: none yet."""
        ...

    @property
    def companions(self) -> Sequence[str]:
        """Other services on the same weights, with which it is co-batched."""
        ...

    @property
    def last_prefill(self) -> int:
        """Number of the last step with prompt tokens; -1: none yet."""
        ...

    @property
    def consecutive_steps(self) -> int:
        """Number of its latest steps with decodes only, since a prompt or a step of another service."""
        ...

    @property
    def traits(self) -> ServiceTraits: ...

    def lengths(self) -> LengthDistribution:
        """Distribution of its output lengths."""
        ...


class SchedulerView(NamedTuple):
    """Input of an order."""

    services: Mapping[str, ServiceView]
    step: int
    """Number of the next step."""
