"""Victims: which running request loses its KV when another needs a block and none is free.

The victim's tokens stay; it waits again, and its KV is computed again or was saved. The scheduler never
offers the request that was admitted longest ago, so every choice leaves somebody who is sure to finish
(see ``Scheduler``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.schedule.crowd import Crowd
from shoal.schedule.group import GroupView
from shoal.schedule.members import IntArray
from shoal.schedule.tracked import Tracked

YOUNG = 0.8
"""``large-young`` takes requests below this share of the mean output length."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a victim policy sees.

    candidates: whom it may choose, longest admitted first; never empty. groups and crowds: all running
    requests, of which a crowd's columns are a group's ``running`` in order. capacity: of the pool, in
    merged blocks. priority: how urgent the order finds each of some requests, smaller first.
    """

    candidates: Sequence[Tracked]
    groups: Mapping[str, GroupView]
    crowds: Mapping[str, Crowd]
    capacity: int
    priority: Callable[[Sequence[Tracked]], Sequence[float]]

    def size(self, request: Tracked) -> float:
        """Merged blocks that a request holds, in fractions."""
        layout = self.crowds[request.service].layout
        return len(request.blocks) / layout.blocks_per_merged * layout.units_per_block


class Victim(Protocol):
    """Chooses who leaves."""

    def choose(self, shortage: Shortage) -> Tracked:
        """One of the candidates; has no effects."""


class Newest:
    """The one admitted last (Past-Future scheduler, and vLLM's recomputation)."""

    def choose(self, shortage: Shortage) -> Tracked:
        """The last candidate."""
        return shortage.candidates[-1]


class LargeYoung:
    """The largest holder that is still young and was never evicted; where there is none, the newest.

    Young is below 0.8 of the mean output length that its service's history gives. One eviction then makes
    room for long, and what it cost in generated tokens is little.
    """

    def choose(self, shortage: Shortage) -> Tracked:
        """The largest that qualifies; of equals the newest."""
        young = [one for one in shortage.candidates if not one.evictions and self._is_young(one, shortage)]
        if not young:
            return shortage.candidates[-1]
        return max(young, key=lambda one: (shortage.size(one), one.sequence))

    def _is_young(self, request: Tracked, shortage: Shortage) -> bool:
        lengths = shortage.crowds[request.service].lengths
        mean = lengths.mean_beyond(np.zeros(1, dtype=np.int64), np.array([request.ceiling]))[0]
        return request.generated < YOUNG * float(mean)


class SmallestThatFits:
    """The smallest holder without which the mean forecast of M* fits; where there is none, the largest."""

    def choose(self, shortage: Shortage) -> Tracked:
        """The first by size; of equals the newest."""
        by_size = sorted(shortage.candidates, key=lambda one: (shortage.size(one), -(one.sequence or 0)))
        peaks = {name: _mean_peak(crowd) for name, crowd in shortage.crowds.items()}
        total = sum(peaks.values())
        for one in by_size:
            crowd = shortage.crowds[one.service]
            rest = crowd.without(shortage.groups[one.service].running.index(one))
            if total - peaks[one.service] + _mean_peak(rest) <= shortage.capacity:
                return one
        return by_size[-1]


class LowestPriority:
    """The one that the order would serve last; of equals the newest."""

    def choose(self, shortage: Shortage) -> Tracked:
        """The largest priority value."""
        priorities = shortage.priority(shortage.candidates)
        last = max(priorities)
        return next(
            one
            for priority, one in zip(reversed(priorities), reversed(shortage.candidates), strict=True)
            if priority == last
        )


class FewestTokens:
    """The one with the fewest tokens, so that least is computed again; of equals the newest."""

    def choose(self, shortage: Shortage) -> Tracked:
        """The fewest computed tokens."""
        return min(shortage.candidates, key=lambda one: (one.computed, -(one.sequence or 0)))


def _mean_peak(crowd: Crowd) -> int:
    """M* if every request has the mean length believed of it, rounded up."""
    if not len(crowd):
        return 0
    mean = crowd.lengths.mean_beyond(crowd.generated, crowd.members.ceilings)
    lengths: IntArray = np.ceil(mean).astype(np.int64)
    return int(crowd.demand.peak(crowd.remaining(lengths)[None, :])[0])


VICTIMS: dict[str, type[Victim]] = {
    "newest": Newest,
    "large-young": LargeYoung,
    "smallest-that-fits": SmallestThatFits,
    "lowest-priority": LowestPriority,
    "fewest-tokens": FewestTokens,
}
"""Victim policies by name."""
