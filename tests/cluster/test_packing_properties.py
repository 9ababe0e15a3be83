"""What holds for every packer whatever happens, and what only Mell promises."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_builders import CAPACITY, Steps, arrival, fewest_bins, make_packing, operations_of, sequences

from shoal.cluster.packing import (
    NEEDS,
    PACKERS,
    BestFit,
    ClassMell,
    DeviceGroup,
    LazyMell,
    LoadBalance,
    Operations,
    Packer,
    Packing,
    SizeClass,
    WorstFit,
)

VARIANTS: dict[str, Callable[[Packing], Packer]] = {
    **PACKERS,
    "best-fit reserving": lambda packing: BestFit(packing, need=NEEDS["reserve-mean"]),
    "worst-fit reserving": lambda packing: WorstFit(packing, need=NEEDS["reserve-mean"]),
    "load-balance draining": lambda packing: LoadBalance(packing, threshold=0.0, draining=True),
    "mell departing": lambda packing: ClassMell(packing, departs_others=True),
    "mell tight": lambda packing: LazyMell(packing, headroom=0.0, relief=0.0, spare=0.0),
}
RATIO, MORE = 4 / 3, 4


class Follower:
    """Carries changes out as an executor would, and so knows where every request is."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.active: set[str] = set()

    def follow(self, operations: Operations, changes) -> None:
        arrivals = [each.id for each in operations.arrivals]
        assert sorted([*changes.placed, *changes.refused]) == sorted(arrivals)
        for id in operations.departures:
            del self.places[id]
        for id in changes.preempted:
            del self.places[id]
        moved = [migration.id for migration in changes.migrations]
        assert len(set(moved)) == len(moved)
        for migration in changes.migrations:
            assert self.places[migration.id] == migration.source != migration.target
            self.places[migration.id] = migration.target
        self.places.update(changes.placed)
        self.active |= set(changes.activated)
        self.active -= set(changes.terminated)
        assert self.active == set(self.places.values())


def run(packer: Packer, steps: Steps, per_batch: int, apart: bool = False) -> int:
    """Carry the steps out in batches, check the packing after each; the number of migrations."""
    follower, migrations = Follower(), 0
    for first in range(0, len(steps), per_batch):
        operations = operations_of(steps[first : first + per_batch], packer.packing, first)
        for each in operations.apart() if apart else [operations]:
            kept = [id for id in each.departures if id in packer.packing.items]
            grown = {id: growth for id, growth in each.updates.items() if id in packer.packing.items}
            each = Operations(departures=kept, updates=grown, arrivals=each.arrivals)
            changes = packer.apply(each)
            packer.packing.check_integrity()
            follower.follow(each, changes)
            migrations += len(changes.migrations)
        assert follower.places == {id: item.group for id, item in packer.packing.items.items()}
    return migrations


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("groups", [2, 40])
@given(steps=sequences(CAPACITY), per_batch=st.integers(1, 8))
def test_memory_suffices_and_every_request_is_in_one_group(name, groups, steps, per_batch) -> None:
    run(VARIANTS[name](make_packing(groups)), steps, per_batch)


@pytest.mark.parametrize("name", VARIANTS)
@given(steps=sequences(CAPACITY // 3), per_batch=st.integers(1, 8))
def test_small_requests_are_packed_as_safely(name, steps, per_batch) -> None:
    run(
        VARIANTS[name](make_packing(3, capacity=CAPACITY)),
        [(k, w, 1 + s // 4) for k, w, s in steps],
        per_batch,
    )


@pytest.mark.parametrize("name", VARIANTS)
@given(steps=sequences(500), per_batch=st.integers(1, 8), data=st.data())
def test_groups_may_differ_in_memory_services_and_host(name, steps, per_batch, data) -> None:
    packing = Packing(
        [
            DeviceGroup(name="a", capacity=600, services=frozenset({"x"}), host="h"),
            DeviceGroup(name="b", capacity=500, services=frozenset({"y"}), host="h"),
            DeviceGroup(name="c", capacity=900, services=frozenset({"x", "y"}), host="i"),
            DeviceGroup(name="d", capacity=700, host="i"),
        ]
    )
    packer = VARIANTS[name](packing)
    follower = Follower()
    for first in range(0, len(steps), per_batch):
        plain = operations_of(steps[first : first + per_batch], packing, first)
        arrivals = [
            arrival(each.id, each.size, each.expected, data.draw(st.sampled_from(["x", "y"])))
            for each in plain.arrivals
        ]
        operations = Operations(departures=plain.departures, updates=plain.updates, arrivals=arrivals)
        follower.follow(operations, packer.apply(operations))
        packing.check_integrity()


@pytest.mark.parametrize("name", VARIANTS)
@given(steps=sequences(CAPACITY))
def test_the_same_operations_give_the_same_changes(name, steps) -> None:
    packers = [VARIANTS[name](make_packing(10)) for _ in range(2)]
    for first in range(0, len(steps), 3):
        operations = operations_of(steps[first : first + 3], packers[0].packing, first)
        one, other = (packer.apply(operations) for packer in packers)
        assert one == other


@pytest.mark.parametrize("name", ["mell", "mell tight", "mell-forecast", "mell-eager", "mell-literal"])
@given(steps=sequences(CAPACITY, longest=24), per_batch=st.integers(1, 4))
def test_few_requests_take_no_more_groups_than_the_paper_promises(name, steps, per_batch) -> None:
    packer = VARIANTS[name](make_packing())
    for first in range(0, len(steps), per_batch):
        packer.apply(operations_of(steps[first : first + per_batch], packer.packing, first))
        sizes = [item.size for item in packer.packing.items.values()]
        if len(sizes) <= 12:
            assert len(packer.packing.active()) <= RATIO * fewest_bins(sizes, CAPACITY) + MORE


def cut_up(bins: int, seed: int) -> list[int]:
    """Sizes that fill so many bins to the brim, in random order."""
    random_ = random.Random(seed)
    sizes = []
    for _ in range(bins):
        cuts = sorted(random_.sample(range(1, CAPACITY), random_.randint(0, 6)))
        sizes += [high - low for low, high in zip([0, *cuts], [*cuts, CAPACITY], strict=True)]
    random_.shuffle(sizes)
    return sizes


@pytest.mark.parametrize("name", ["mell", "mell tight", "mell-eager"])
@pytest.mark.parametrize("seed", range(5))
def test_many_requests_of_which_the_best_packing_is_known(name, seed) -> None:
    packer = VARIANTS[name](make_packing(200))
    sizes = cut_up(60, seed)
    for number, size in enumerate(sizes):
        packer.apply(Operations(arrivals=[arrival(f"r{number}", size)]))
    packer.packing.check_integrity()
    assert len(packer.packing.active()) <= RATIO * 60 + MORE
    gone = random.Random(seed).sample(sorted(packer.packing.items), len(sizes) // 2)
    for id in gone:
        packer.apply(Operations(departures=[id]))
    assert len(packer.packing.active()) <= RATIO * 60 + MORE


def few_large_beside_many(packer: Packer) -> None:
    """Requests that first fit well, of which only those stay that fit badly."""
    for number in range(40):
        packer.apply(Operations(arrivals=[arrival(f"l{number}", 620), arrival(f"m{number}", 570)]))
    packer.apply(Operations(departures=[f"l{number}" for number in range(40)]))


@pytest.mark.parametrize("name", ["mell", "mell-eager"])
def test_groups_are_given_back_when_large_requests_end(name) -> None:
    packer = VARIANTS[name](make_packing(80))
    few_large_beside_many(packer)
    assert len(packer.packing.active()) <= 20 + 3


def exceptions(packer: ClassMell) -> dict[int, int]:
    """How many groups break each of the paper's properties (Theorem 1)."""
    structure, active = packer.structure, packer.packing.active()
    kinds = {one.group.name: structure.of(one) for one in active}
    broken = dict.fromkeys(range(1, 6), 0)
    tiny_groups = any(kind is SizeClass.TINY for kind in kinds.values())
    loose = [
        item
        for one in active
        if kinds[one.group.name] in (SizeClass.SMALL, SizeClass.MEDIUM)
        for item in structure.members(one, (SizeClass.SMALL, SizeClass.MEDIUM))
    ]
    for one in active:
        kind = kinds[one.group.name]
        counts = {each: len(structure.members(one, (each,))) for each in SizeClass}
        if kind is SizeClass.MEDIUM:
            broken[1] += counts[SizeClass.MEDIUM] != 2 or counts[SizeClass.SMALL] > 0
        elif kind is SizeClass.SMALL:
            broken[2] += counts[SizeClass.SMALL] != 3
        elif kind is SizeClass.TINY:
            broken[3] += one.used < 0.75 * CAPACITY
        else:
            alone = not counts[SizeClass.MEDIUM] + counts[SizeClass.SMALL]
            large = max(item.size for item in one.items.values())
            broken[4] += alone and any(large + item.size <= CAPACITY for item in loose)
        if kind in (SizeClass.LARGE, SizeClass.MEDIUM) and tiny_groups:
            broken[5] += one.used < 0.75 * CAPACITY
    return broken


@pytest.mark.parametrize("seed", range(4))
def test_the_papers_properties_hold_but_for_a_few_groups(seed) -> None:
    packer = ClassMell(make_packing(200))
    random_ = random.Random(seed)
    steps = [
        (
            random_.choice(["arrive", "arrive", "grow", "depart"]),
            random_.randrange(400),
            random_.randint(151, 1000),
        )
        for _ in range(400)
    ]
    run(packer, steps, per_batch=1)
    assert len(packer.packing.active()) > 30
    assert max(exceptions(packer).values()) <= 4, exceptions(packer)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("seed", range(3))
def test_operations_together_move_less_than_one_after_the_other(name, seed) -> None:
    random_ = random.Random(seed)
    steps = [
        (
            random_.choice(["arrive", "arrive", "grow", "depart"]),
            random_.randrange(400),
            random_.randint(20, 900),
        )
        for _ in range(300)
    ]
    together = run(VARIANTS[name](make_packing(100)), steps, per_batch=12)
    apart = run(VARIANTS[name](make_packing(100)), steps, per_batch=12, apart=True)
    assert together <= apart


def over_an_eighth(steps: Steps) -> Steps:
    """The same with sizes that no group holds more than seven of."""
    return [(kind, which, max(size, CAPACITY // 8 + 1)) for kind, which, size in steps]


@pytest.mark.parametrize("name", ["mell-eager", "mell-literal"])
@given(steps=sequences(CAPACITY))
def test_an_operation_by_classes_moves_few_requests(name, steps) -> None:
    packer = PACKERS[name](make_packing())
    for number, step in enumerate(over_an_eighth(steps)):
        changes = packer.apply(operations_of([step], packer.packing, number))
        assert len(changes.migrations) <= 16


@given(steps=sequences(CAPACITY))
def test_our_mell_moves_few_but_where_a_group_ends(steps) -> None:
    packer = LazyMell(make_packing())
    for number, step in enumerate(over_an_eighth(steps)):
        changes = packer.apply(operations_of([step], packer.packing, number))
        own = {"arrive": 1, "grow": 14, "depart": 0}[step[0]]
        assert len(changes.migrations) <= own + 7 * (len(changes.terminated) + len(changes.activated))


def test_classes_of_requests_that_ended_are_forgotten() -> None:
    packer = PACKERS["mell-eager"](make_packing())
    for number in range(200):
        packer.apply(Operations(arrivals=[arrival(f"r{number}", 700)]))
        packer.apply(Operations(departures=[f"r{number}"] if number else []))
    assert len(packer._classes) <= 70
