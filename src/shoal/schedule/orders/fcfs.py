"""First come, first served: over all services as far as it fits, or strictly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.group import GroupView
from shoal.schedule.orders.protocol import Decision, Standing, Turn
from shoal.schedule.tracked import Tracked

PATIENCE_STEPS = 64
"""``fcfs`` does not pass over a service with running requests for more steps of others than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BySubmission:
    """What orders have in common whose only priority is age."""

    steady: ClassVar[bool] = True
    reads_lengths: ClassVar[bool] = False

    def rank(self, one: Tracked, group: GroupView) -> float:
        """The same for all, so that the number of submission decides."""
        return 0.0

    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """The numbers of submission."""
        return [one.number for one in requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fcfs(BySubmission):
    """First come, first served, as far as it fits.

    The service of the oldest request that can be prefilled now steps (waiting and admissible, or running
    and not yet through its prompt), its decodes riding along; otherwise the service that decodes and has
    not stepped for longest. A head that does not fit blocks its own service only.

    Prompts of one service hold up the decodes of another for at most ``PATIENCE_STEPS`` steps at a time.
    """

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Overdue services, then prompts by age, then decodes by the time since the last step."""
        groups = [group for group in standing.groups.values() if group.running or group.waiting]
        by_last_step = sorted((group for group in groups if group.running), key=lambda one: one.last_step)
        turns = [
            Turn(group.service, group.running)
            for group in by_last_step
            if standing.step - group.last_step > PATIENCE_STEPS
        ]
        candidates = [(oldest, group) for group in groups if (oldest := _oldest_prompt(group)) is not None]
        candidates.sort(key=lambda pair: pair[0])
        turns += [Turn(group.service, group.running, group.waiting, prefill=True) for _, group in candidates]
        turns += [Turn(group.service, group.running) for group in by_last_step]
        return Decision(turns)


def _oldest_prompt(group: GroupView) -> int | None:
    ages = [request.number for request in group.prefills]
    if group.waiting:
        ages.append(group.waiting[0].number)
    return min(ages, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FcfsStrict(BySubmission):
    """The service of the oldest unfinished request steps, and only it admits.

    Where that comes to nothing (its head does not fit into what others hold), the next oldest steps with
    what it has running, so that memory comes free. Nobody younger overtakes the oldest in another service,
    so that it is admitted once those running have ended.
    """

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Services by the age of their oldest unfinished request."""
        groups = [group for group in standing.groups.values() if group.running or group.waiting]
        if len(groups) > 1:
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
