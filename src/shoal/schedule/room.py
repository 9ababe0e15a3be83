"""Making room: who gives up memory so that a running, a starved or a more urgent request can go on."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from shoal.kvcache import BlockPool
from shoal.schedule.admission import Admission
from shoal.schedule.compose import slice_blocks
from shoal.schedule.crowd import Crowd
from shoal.schedule.group import Group
from shoal.schedule.larger_crowd import LargerCrowd
from shoal.schedule.ledger import Ledger
from shoal.schedule.orders import Order
from shoal.schedule.tracked import BY_SEQUENCE, Tracked
from shoal.schedule.victims import Shortage, Victim


class _Crowds(Mapping[str, Crowd]):
    """Every service's crowd, made when somebody asks: most victims are chosen without."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups

    def __getitem__(self, service: str) -> Crowd:
        return self._groups[service].crowd()

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


class Room:
    """Chooses and evicts; called only while no plan is in flight."""

    def __init__(
        self, pool: BlockPool, ledger: Ledger, order: Order, victim: Victim, admission: Admission
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._groups = ledger.groups
        self._order = order
        self._victim = victim
        self._admission = admission

    def compact(self, service: str, blocks: int) -> bool:
        """Move blocks so that ``blocks`` more of a service can be allocated; whether that worked."""
        moves = self._pool.compact(service, blocks)
        if moves is None:
            return False
        self._ledger.compacted(moves)
        return True

    def evict_one(self) -> None:
        """Take the memory of one running request, as the victim policy says; never the oldest admitted."""
        candidates = self._by_admission()[1:]
        shortage = Shortage(
            candidates, self._groups, _Crowds(self._groups), self._pool.capacity, self._priorities
        )
        self._ledger.evict(self._victim.choose(shortage))

    def holders(self) -> int:
        """How many requests hold memory."""
        return sum([len(group.rows) for group in self._groups.values()])

    def weaker(self, one: Tracked, *, starved: bool) -> list[Tracked]:
        """Running requests that must give way to ``one``, the least urgent last.

        Those that the order finds less urgent, never the oldest admitted. For a ``starved`` one everybody,
        but first those of its own service: one that has too much to do does not take it out on others.
        Under slices nobody gives way inside one.
        """
        own = self._order.priorities(self._groups[one.service], [one])[0]
        oldest = min(
            (group.running[0].sequence or 0 for group in self._groups.values() if group.running), default=0
        )
        slices = self._admission.slice_tokens is not None
        weaker = []
        for group in self._groups.values():
            same = starved and group.service == one.service
            for priority, other in zip(
                self._order.priorities(group, group.running), group.running, strict=True
            ):
                if not starved and (priority <= own or other.sequence == oldest):
                    continue
                if slices and other.expected < other.slice_end:
                    continue
                weaker.append(((same, priority, other.sequence or 0), other))
        weaker.sort(key=itemgetter(0))
        return [other for _, other in weaker]

    def would_fit(self, one: Tracked, gone: Sequence[Tracked], *, always: bool) -> bool:
        """Whether ``one`` could be let in if all of ``gone`` gave up their memory."""
        if len(gone) == self.holders():
            return True
        crowds = {name: group.crowd_without(gone) for name, group in self._groups.items()}
        joined = LargerCrowd(crowds[one.service], one, crowds[one.service].shared)
        others = [crowd for name, crowd in crowds.items() if name != one.service]
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is not None:
            needed = slice_blocks(one, slice_tokens, self._pool.block_size)
            held = self._held_without(gone)
            held[one.service] = held.get(one.service, 0) + needed
            if sum(self._pool.merged_demand(*item) for item in held.items()) > self._pool.capacity:
                return False
        if always:
            return joined.footprint + sum(crowd.footprint for crowd in others) <= self._pool.capacity
        return self._admission.fits([joined, *others], self._pool.capacity)

    def _held_without(self, gone: Sequence[Tracked]) -> dict[str, int]:
        freed: dict[str, int] = {}
        for one in gone:
            freed[one.service] = freed.get(one.service, 0) + len(one.blocks) - one.shareable
        return {name: self._pool.live_blocks(name) - freed.get(name, 0) for name in self._groups}

    def _by_admission(self) -> list[Tracked]:
        everybody = [one for group in self._groups.values() for one in group.running]
        everybody.sort(key=BY_SEQUENCE)
        return everybody

    def _priorities(self, requests: Sequence[Tracked]) -> list[float]:
        """Of some running requests; asked of all at once, whose columns are at hand."""
        found: dict[Tracked, float] = {}
        for service in {one.service for one in requests}:
            group = self._groups[service]
            values = self._order.priorities(group, group.running)
            found.update(zip(group.running, values, strict=True))
        return [found[one] for one in requests]
