"""Orders: which service steps next, and in which order its requests take part.

An order is a pure function of what it sees. It lists turns by preference; the scheduler takes the first
that comes to something. Starvation is not its business: the scheduler puts turns of those who waited
too long before all others.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from shoal.schedule.policies.view import SchedulerView, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable


class Turn(NamedTuple):
    """A step of one service.

    Requests missing one token go before those missing more, within the limit of tokens. Decodes have their
    rows in the order of admission, so that they keep their places from step to step.
    """

    service: str
    """Whose step it is."""
    seq_ids: IntArray | None = None
    """Running requests that take part, in the order of admission; None: all of them."""
    keys: FloatArray | None = None
    """How urgent each of ``seq_ids`` is, smaller first; None: by admission. Equals go by admission."""
    waiting: Iterable[RequestState] = ()
    """Requests to admit, first first; the first that does not fit ends it."""
    prefill: bool = False
    """The turn is off unless it computes a prompt, of a request that waits or begun before."""


class Decision(NamedTuple):
    """What an order wants."""

    turns: Sequence[Turn]
    """By preference."""
    until_ns: int | None = None
    """When to ask again if none comes to anything; None: only after an event."""


class Order(Protocol):
    """Chooses who steps; holds knobs, no state.

    While one service alone has requests, nobody waits and nobody computes a prompt, every turn must be of all
    of them: such steps need no decision.
    """

    steady: ClassVar[bool]
    """That also holds while some wait, who are offered in the order of the queue."""
    reads_lengths: ClassVar[bool]
    """It looks at predicted lengths."""
    reads_priorities: ClassVar[bool]
    """It looks at ``Request.priority``; with another order clients cannot give one."""

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """The place of a request among the waiting of its service: smaller first, equals by arrival.

        Asked once whenever it begins to wait: when it is submitted, and when it is preempted. The scheduler
        may put it last instead (``SchedulerOptions.on_hopeless``).
        """
        ...

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """How urgent requests of one service are, smaller first [n]; comparable across services."""
        ...

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """What to try now; has no effects and reads nothing else."""
        ...
