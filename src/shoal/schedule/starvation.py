"""Nobody waits for ever: who has gone without a step too long, whatever the order prefers.

SeaLLM (section 4.2) serves starved requests first. Under overload everybody who waits is starved, and an
order would be none; so here each service's longest unserved request comes first, but once per threshold.
"""

from collections.abc import Iterable

from shoal.schedule.group import Group
from shoal.schedule.tracked import Tracked


class Guard:
    """Watches over requests that have not taken part in a step for ``threshold_ns``.

    The threshold of a request doubles whenever it was evicted for a starved one, so that two that do not fit
    beside each other get ever longer turns instead of evicting one another for ever.
    """

    def __init__(self, threshold_ns: int) -> None:
        self._threshold_ns = threshold_ns

    def due_ns(self, one: Tracked) -> int:
        """When it starves."""
        return one.served_ns + (self._threshold_ns << min(one.displaced, 20))

    def starving(self, groups: Iterable[Group], now_ns: int) -> list[Tracked]:
        """At most one request of each service, the longest starved first."""
        found = [
            one
            for group in groups
            if now_ns >= self._next_ns(group)
            for one in self._candidates(group, now_ns)[:1]
        ]
        return sorted(found, key=self.due_ns) if len(found) > 1 else found

    def served(self, group: Group, now_ns: int) -> None:
        """A plan was made for a starved request of the service."""
        group.served_guard_ns = now_ns

    def next_ns(self, groups: Iterable[Group], now_ns: int) -> int | None:
        """When somebody will starve next; None while nobody can."""
        times = [
            max(self._next_ns(group), min(map(self.due_ns, candidates)))
            for group in groups
            if (candidates := self._unserved(group))
        ]
        return min(times, default=None)

    def nobody_before_ns(self, group: Group, served_ns: int) -> int:
        """A time before which nobody of a service starves, if those running were served at ``served_ns``."""
        waits = group.waiting.first_due()
        due_ns = served_ns + self._threshold_ns
        if waits is not None:
            due_ns = min(due_ns, self.due_ns(waits))
        return max(due_ns, self._next_ns(group))

    def _next_ns(self, group: Group) -> int:
        return 0 if group.served_guard_ns is None else group.served_guard_ns + self._threshold_ns

    def _unserved(self, group: Group) -> list[Tracked]:
        waits = group.waiting.first_due()
        return [*group.running, waits] if waits is not None else list(group.running)

    def _candidates(self, group: Group, now_ns: int) -> list[Tracked]:
        starved = []
        waits = group.waiting.first_due()
        if waits is not None and now_ns >= self.due_ns(waits):
            starved.append(waits)
        if group.running and now_ns >= group.earliest_due_ns:
            longest = min(group.running, key=self.due_ns)
            # Steps only move it on, so until then nobody need look again.
            group.earliest_due_ns = self.due_ns(longest)
            if now_ns >= group.earliest_due_ns and not longest.in_flight:
                starved.append(longest)
        starved.sort(key=self.due_ns)
        return starved
