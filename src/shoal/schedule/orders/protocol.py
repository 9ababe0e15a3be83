"""Orders: which service steps next, and in which order its requests take part.

An order is a pure function of what it sees. It lists turns by preference; the scheduler takes the first
that comes to something. Starvation is not its business: the scheduler puts turns of those who waited
too long before all others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from shoal.schedule.group import GroupView
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Standing:
    """What an order sees: every service's requests, and how far the scheduler has come.

    step: number of the next plan.
    """

    groups: Mapping[str, GroupView]
    step: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A step of one service.

    running: requests that take part, most wanted first; those missing one token go before those missing
    more, within the limit of tokens. (Decodes then have their rows in the order of admission, so that they
    keep their places from step to step.) waiting: requests to admit, first first; the first that does not
    fit ends it. prefill: the turn is off unless it computes a prompt, of a newcomer or begun before.
    """

    service: str
    running: Sequence[Tracked]
    waiting: Iterable[Tracked] = ()
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Turns by preference, and when to ask again if none comes to anything (None: only after an event)."""

    turns: Sequence[Turn]
    until_ns: int | None = None


class Order(Protocol):
    """Chooses who steps; holds knobs, no state.

    While one service alone has requests, nobody waits and nobody computes a prompt, every turn must be of all
    of them: simulations skip such steps.

    steady: that also holds while some wait, who are offered in the order of the queue.
    reads_lengths: it looks at predicted lengths.
    """

    steady: ClassVar[bool]
    reads_lengths: ClassVar[bool]

    def rank(self, one: Tracked, group: GroupView) -> float:
        """Its place among the waiting of its service: smaller first, equal ones by submission.

        Asked once whenever it begins to wait: when it is submitted, and when it is evicted.
        """
        ...

    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """How urgent requests of one service are, smaller first; comparable across services."""
        ...

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """What to try now; has no effects and reads nothing else."""
        ...
