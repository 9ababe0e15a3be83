"""What policies may read of a service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.forecast import LengthDistribution
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import RequestTable


@dataclass(frozen=True, slots=True)
class ServiceTraits:
    """What is known of a service that orders may use."""

    mean_s: float
    """Mean execution time of its requests (the steps they took part in), as learned online."""
    deviation_s: float
    """Standard deviation of the same."""
    mean_output_tokens: float | None = None
    """Of its finished requests; None before the first."""
    quota: int = 8
    """Decode steps in a row, for orders that go round."""
    alone_s: float | None = None
    """Execution time of the mean request when it runs alone; None where nobody said it."""


class ServiceView(Protocol):
    """One service, as policies see it."""

    @property
    def service(self) -> str:
        """Its name."""
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
        """Number of the last step that was its turn, or in which all who decode took part; -1: none yet."""
        ...

    @property
    def last_turn(self) -> int:
        """Number of the last step that was its turn, and not that of another on the same weights; -1: none
        yet."""
        ...

    @property
    def companions(self) -> Sequence[str]:
        """Other services on the same weights, whose decodes take part in its steps and its own in theirs."""
        ...

    @property
    def last_prefill(self) -> int:
        """Number of the last step that computed part of a prompt; -1: none yet."""
        ...

    @property
    def consecutive_steps(self) -> int:
        """Its latest steps of decodes only, without a step of another service or a prompt between them."""
        ...

    @property
    def traits(self) -> ServiceTraits:
        """What is known of it."""
        ...

    def lengths(self) -> LengthDistribution:
        """What its past says about output lengths."""
        ...


class SchedulerView(NamedTuple):
    """What an order sees: every service, and how far the scheduler has come."""

    services: Mapping[str, ServiceView]
    """By name."""
    step: int
    """Number of the next step."""
