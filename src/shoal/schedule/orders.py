"""Orders: which service steps next, and in which order its requests take part.

An order is a pure function of what it sees. It lists turns by preference; the scheduler takes the first
that comes to something. Priorities over requests, budgets (``Tracked.charged_ns``), quotas and starvation
limits need no more than this: a turn carries its requests in the order wanted, and a decision says when
to ask again although nothing happened.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from shoal.schedule.group import GroupView
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Standing:
    """What an order sees: every service's requests, and how far the scheduler has come.

    step: number of the next plan. admissions: how many requests have been admitted so far.
    """

    groups: Mapping[str, GroupView]
    step: int
    admissions: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A step of one service.

    running: requests that take part, most wanted first; those missing one token go before those missing
    more, within the limit of tokens. waiting: requests to admit, first first; the first that does not
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
    """Chooses who steps."""

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """What to try now; has no effects and reads nothing else."""


PATIENCE_STEPS = 64
"""A service with running requests is not passed over for more steps of others than this."""

PATIENCE_ADMISSIONS = 256
"""A refused head of a queue sees no more admissions than this before those behind it must wait too."""


class Fcfs:
    """First come, first served, as far as it fits.

    The service of the oldest request that can be prefilled now steps (waiting and admissible, or running
    and not yet through its prompt), its decodes riding along; otherwise the service that decodes and has
    not stepped for longest. A head that does not fit blocks its own service only.

    Nobody starves. A refused head that has seen ``PATIENCE_ADMISSIONS`` requests pass becomes a barrier:
    nobody younger, of any service, is admitted before it; those running end, and at the latest the then
    idle engine admits it. Prompts of one service hold up the decodes of another for at most
    ``PATIENCE_STEPS`` steps at a time.
    """

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Overdue services, then prompts by age, then decodes by the time since the last step."""
        groups = [group for group in standing.groups.values() if group.running or group.waiting]
        barrier = _barrier(groups, standing.admissions)
        by_last_step = sorted((group for group in groups if group.running), key=lambda one: one.last_step)
        turns = [
            Turn(group.service, group.running)
            for group in by_last_step
            if standing.step - group.last_step > PATIENCE_STEPS
        ]
        candidates = [(oldest, group) for group in groups if (oldest := _oldest_prompt(group)) is not None]
        candidates.sort(key=lambda pair: pair[0])
        for _, group in candidates:
            waiting: Iterable[Tracked] = group.waiting
            if barrier is not None:
                waiting = takewhile(lambda one: one.number <= barrier, waiting)
            turns.append(Turn(group.service, group.running, waiting, prefill=True))
        turns += [Turn(group.service, group.running) for group in by_last_step]
        return Decision(turns)


def _oldest_prompt(group: GroupView) -> int | None:
    ages = [request.number for request in group.prefills]
    if group.waiting:
        ages.append(group.waiting[0].number)
    return min(ages, default=None)


def _barrier(groups: Sequence[GroupView], admissions: int) -> int | None:
    """The oldest head whose patience is at its end."""
    heads = [group.waiting[0] for group in groups if group.waiting]
    return min(
        (
            head.number
            for head in heads
            if head.refused_at is not None and admissions - head.refused_at >= PATIENCE_ADMISSIONS
        ),
        default=None,
    )


class FcfsStrict:
    """The service of the oldest unfinished request steps, and only it admits.

    Where that comes to nothing (its head does not fit into what others hold), the next oldest steps with
    what it has running, so that memory comes free. Nobody younger overtakes the oldest in another service,
    so that it is admitted once those running have ended.
    """

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Services by the age of their oldest unfinished request."""
        groups = [group for group in standing.groups.values() if group.running or group.waiting]
        groups.sort(key=_oldest)
        turns = [Turn(group.service, group.running) for group in groups[1:] if group.running]
        if groups:
            turns.insert(0, Turn(groups[0].service, groups[0].running, groups[0].waiting))
        return Decision(turns)


def _oldest(group: GroupView) -> int:
    ages = [request.number for request in group.running]
    if group.waiting:
        ages.append(group.waiting[0].number)
    return min(ages)


ORDERS: dict[str, type[Order]] = {"fcfs": Fcfs, "fcfs-strict": FcfsStrict}
"""Orders by name."""
