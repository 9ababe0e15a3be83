"""Interface of orders: Turn (a step of one service), Decision (turns by preference), Order.

An order is a pure function of its view. It lists turns by preference; the scheduler takes the first that
results in a plan. Starvation is handled by the scheduler, which puts turns for starved requests first.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from shoal.schedule.client_accounts import TokenPrices
from shoal.schedule.policies.view import SchedulerView, ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable


class Turn(NamedTuple):
    """A proposed step of one service.

    Decodes come before prompts, within the token budget. The rows of decodes are in the order of admission,
    so that they keep their positions from step to step.
    """

    service: str
    seq_ids: IntArray | None = None
    """Running requests that take part, in the order of admission; None: all of them."""
    keys: FloatArray | None = None
    """Priorities of ``seq_ids``, smaller first; None, and among equals: by admission."""
    waiting: Iterable[RequestState] = ()
    """Requests to admit, in this order; the first that does not fit ends the admission."""
    prefill: bool = False
    """The turn results in no plan unless it computes prompt tokens, of a waiting or a running request."""


class Decision(NamedTuple):
    turns: Sequence[Turn]
    """By preference."""
    until_ns: int | None = None
    """When to decide again if no turn results in a plan; None: after an event."""


class Order(Protocol):
    """Chooses which service and requests step; has options, no state.

    While only one service has requests, and all of them decode, every turn must include all of them: such
    steps need no decision.
    """

    steady: ClassVar[bool]
    """This holds also while requests wait, and these are offered in the order of the queue."""
    reads_lengths: ClassVar[bool]
    """It uses predicted output lengths."""
    reads_priorities: ClassVar[bool]
    """It uses ``Request.priority``; with other orders clients cannot set one."""

    @property
    def prices(self) -> TokenPrices | None:
        """Prices at which clients' tokens are counted; None: it does not read ``RequestState.account``."""
        ...

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Position of a request in the waiting queue of its service: smaller first, equal ones by arrival.

        Called once when the request begins to wait: when it is submitted, and when it is preempted. The
        scheduler may put it last instead (``SchedulerOptions.on_hopeless``).
        """
        ...

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Priorities of requests of one service, smaller first [n]; comparable across services."""
        ...

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """The turns to try now; without side effects."""
        ...
