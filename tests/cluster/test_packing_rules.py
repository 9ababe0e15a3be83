"""Each rule by an example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_builders import CAPACITY, arrival, arrive, depart, fewest_bins, grow, make_packing, together

from shoal.cluster.packing import (
    PACKERS,
    BestFit,
    ClassMell,
    DeviceGroup,
    Growth,
    Item,
    LazyMell,
    LoadBalance,
    Migration,
    Operations,
    Packing,
    Priority,
    SizeClass,
    WorstFit,
    bundle_of,
    forecast_peak,
    reserve_mean,
    size_class,
)
from shoal.core import ConfigError


def groups_of(*requests: str) -> set[frozenset[str]]:
    """Groups written as the letters of their requests."""
    return {frozenset(each) for each in requests}


def make_item(id: str, size: int, expected: int = 0) -> Item:
    return Item(id=id, service="s", size=size, expected=max(size, expected))


def test_classes_have_their_upper_bounds() -> None:
    sizes = {1200: "LARGE", 601: "LARGE", 600: "MEDIUM", 401: "MEDIUM", 400: "SMALL", 301: "SMALL"}
    sizes |= {300: "TINY", 151: "TINY", 150: "BUNDLED", 0: "BUNDLED"}
    assert {size: size_class(size, CAPACITY).name for size in sizes} == sizes


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=6))
def test_the_forecast_peak_is_that_of_growing_together(requests) -> None:
    items = [make_item(str(n), size, size + growth) for n, (size, growth) in enumerate(requests)]
    longest = max((growth for _, growth in requests), default=0)
    held = [sum(size + step for size, growth in requests if growth >= step) for step in range(longest + 1)]
    assert forecast_peak(items) == max(held)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(0, 400),
)
def test_a_bundle_is_the_size_of_a_tiny_request_or_all_there_is(sizes, room) -> None:
    items = [make_item(str(n), size) for n, size in enumerate(sizes)]
    bundle = bundle_of(items, CAPACITY, room)
    total = sum(item.size for item in bundle)
    assert total <= room
    assert len({item.id for item in bundle}) == len(bundle)
    if bundle and len(bundle) < len(items):
        assert CAPACITY < 8 * total <= 2 * CAPACITY
    if any(8 * size > CAPACITY and size <= room for size in sizes):
        assert len(bundle) == 1


def test_best_fit_takes_the_fullest_and_worst_fit_the_emptiest_group() -> None:
    for make, expected in ((BestFit, groups_of("ac", "b")), (WorstFit, groups_of("a", "bc"))):
        packer = make(make_packing())
        changes = arrive(packer, a=900, b=800)
        assert sorted(changes.activated) == ["g00", "g01"]
        arrive(packer, c=200)
        assert together(packer.packing) == expected
        assert arrive(packer, d=1000).activated == ["g02"]
        assert depart(packer, "d").terminated == ["g02"]


def test_reserving_counts_what_requests_will_become() -> None:
    for need, count in ((None, 1), (reserve_mean, 2)):
        packer = BestFit(make_packing()) if need is None else BestFit(make_packing(), need=need)
        packer.apply(Operations(arrivals=[arrival("a", 100, 700), arrival("b", 100, 700)]))
        assert len(packer.packing.active()) == count


def test_without_migration_growth_preempts_the_newest_request() -> None:
    packer = BestFit(make_packing())
    arrive(packer, a=500, b=300, c=300)
    changes = grow(packer, a=700)
    assert (changes.preempted, changes.migrations) == (("c",), [])
    assert together(packer.packing) == groups_of("ab")


def test_what_fits_nowhere_is_refused() -> None:
    for make in PACKERS.values():
        packer = make(make_packing(1))
        assert arrive(packer, a=800).placed == {"a": "g00"}
        changes = arrive(packer, b=500, c=200)
        assert changes.refused == ("b",)
        assert changes.placed == {"c": "g00"}


def test_load_balancing_pairs_the_fullest_with_the_emptiest() -> None:
    packer = LoadBalance(make_packing(), threshold=0.2)
    arrive(packer, a=700, b=700)
    changes = arrive(packer, c=400, d=300)
    assert together(packer.packing) == groups_of("ac", "bd")
    changes = depart(packer, "b")
    assert changes.migrations == [Migration("c", "g00", "g01")]
    assert depart(packer, "c").migrations == []  # 700 against 300: moving all of it would not help


def test_the_threshold_says_which_loads_are_alike() -> None:
    for threshold, moved in ((0.0, ["c"]), (0.59, ["c"]), (0.6, [])):
        packer = LoadBalance(make_packing(), threshold=threshold)
        arrive(packer, a=800, b=900)
        arrive(packer, c=300)
        assert together(packer.packing) == groups_of("ac", "b")
        changes = packer.apply(Operations(updates={"b": Growth(380, 380)}))
        assert [each.id for each in changes.migrations] == moved


def test_load_balancing_drains_the_emptiest_group() -> None:
    for draining, spare, groups in ((False, 0.0, 2), (True, 0.0, 1), (True, 0.2, 2)):
        packer = LoadBalance(make_packing(), threshold=1.0, draining=draining, spare=spare)
        arrive(packer, a=600, b=700, c=400)
        assert together(packer.packing) == groups_of("ac", "b")
        assert len(depart(packer, "a").terminated) == 2 - groups
        packer.packing.check_integrity()


def test_load_balancing_moves_growth_to_the_emptiest_group_before_it_preempts() -> None:
    packer = LoadBalance(make_packing(2), threshold=1.0)
    arrive(packer, a=900, b=800, c=300, d=200)
    assert together(packer.packing) == groups_of("ad", "bc")
    changes = grow(packer, b=950)
    assert (len(changes.migrations), changes.preempted) == (0, ("c",))


@pytest.mark.parametrize("name", ["mell-eager", "mell-literal"])
class TestClasses:
    def test_two_medium_or_three_small_fill_a_group(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=500, b=500, c=500)
        arrive(packer, u=350, v=350, w=350, x=350)
        assert together(packer.packing) == groups_of("ab", "c", "uvw", "x")

    def test_a_small_request_goes_beside_a_large_one_and_tiny_ones_give_way(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=700)
        arrive(packer, t=300)
        assert together(packer.packing) == groups_of("at")
        changes = arrive(packer, b=350)
        assert together(packer.packing) == groups_of("ab", "t")
        assert changes.migrations == [Migration("t", "g00", "g01")]

    def test_a_large_request_fetches_a_companion_whose_place_is_filled(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=500, b=500, c=500)
        changes = arrive(packer, d=700)
        assert together(packer.packing) == groups_of("cd", "ab")
        assert [each.id for each in changes.migrations] == ["c"]

    def test_a_group_whose_request_left_is_filled_from_the_latest(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=500, b=500, c=500, d=500)
        changes = depart(packer, "a")
        assert len(changes.migrations) == 1
        assert len(packer.packing.active()) == 2
        assert depart(packer, "b").terminated != []

    def test_arrivals_fill_holes_of_the_same_batch(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=500, b=500, c=500, d=500)
        changes = packer.apply(Operations(departures=["c"], arrivals=[arrival("e", 450)]))
        assert changes.migrations == []
        assert together(packer.packing) == groups_of("ab", "de")

    def test_a_request_of_another_class_goes_where_it_belongs(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=350, b=350, c=320)
        changes = grow(packer, a=450)
        assert together(packer.packing) == groups_of("a", "bc")
        assert [each.id for each in changes.migrations] == ["a"]

    def test_an_overload_moves_tiny_requests_first(self, name) -> None:
        packer = PACKERS[name](make_packing())
        arrive(packer, a=650)
        arrive(packer, s=200, t=300)
        assert together(packer.packing) == groups_of("ast")
        changes = grow(packer, a=800)
        assert [each.id for each in changes.migrations] == ["s"]


def test_as_printed_all_but_the_largest_leave_an_overloaded_large_group() -> None:
    """s finds more room elsewhere, so that t, which would suffice, can come back."""
    for departs_others, moved in ((False, ["t"]), (True, ["s"])):
        packer = ClassMell(make_packing(), departs_others=departs_others)
        arrive(packer, a=650, s=320, t=200)
        arrive(packer, b=700)
        changes = grow(packer, a=750)
        assert [each.id for each in changes.migrations] == moved
        packer.packing.check_integrity()


def test_only_as_mended_tiny_requests_go_beside_medium_ones() -> None:
    for name, expected in (("mell-eager", groups_of("abt")), ("mell-literal", groups_of("ab", "t"))):
        packer = PACKERS[name](make_packing())
        arrive(packer, a=450, b=450)
        arrive(packer, t=200)
        assert together(packer.packing) == expected


def test_lazy_mell_moves_nothing_without_a_gain() -> None:
    packer = LazyMell(make_packing(), headroom=0.0, relief=0.0, spare=0.0)
    arrive(packer, a=700, b=650, c=500, d=520)
    changes = depart(packer, "c")
    assert changes.migrations == []


def test_our_mell_empties_a_group_when_the_others_have_room() -> None:
    packer = LazyMell(make_packing(), headroom=0.0, relief=0.0, spare=0.1)
    arrive(packer, a=700, b=600, c=500)
    assert together(packer.packing) == groups_of("ac", "b")
    changes = grow(packer, c=450)
    assert changes.migrations == []
    assert depart(packer, "a").terminated == ["g00"]
    assert together(packer.packing) == groups_of("bc")


def test_our_mell_moves_one_request_before_it_activates_a_group() -> None:
    packer = LazyMell(make_packing(), headroom=0.0, relief=0.0, spare=0.0)
    arrive(packer, a=700, b=650)
    arrive(packer, t=300, u=200)
    assert together(packer.packing) == groups_of("au", "bt")
    changes = arrive(packer, v=400)
    assert [each.id for each in changes.migrations] == ["u"]
    assert together(packer.packing) == groups_of("av", "btu")


def test_relief_makes_room_for_more_growth() -> None:
    for relief, leaves in ((0.0, "s"), (0.2, "m")):
        packer = LazyMell(make_packing(), headroom=0.0, relief=relief, spare=0.0)
        arrive(packer, a=700, m=350, s=150)
        assert len(packer.packing.active()) == 1
        assert [each.id for each in grow(packer, a=800).migrations] == [leaves]


def test_headroom_stays_free_where_something_is_placed() -> None:
    packer = LazyMell(make_packing(), headroom=0.1, relief=0.0, spare=0.0)
    arrive(packer, a=700, b=450)
    assert len(packer.packing.active()) == 2
    arrive(packer, c=380)
    assert together(packer.packing) == groups_of("ac", "b")


def test_headroom_is_used_where_there_is_no_other_group() -> None:
    packer = LazyMell(make_packing(1), headroom=0.1)
    arrive(packer, a=700, b=450)
    assert together(packer.packing) == groups_of("ab")
    assert arrive(packer, c=51).refused == ("c",)


def test_a_forecast_chooses_the_group_that_lasts() -> None:
    for by_forecast, expected in ((False, groups_of("ac", "b")), (True, groups_of("a", "bc"))):
        packer = LazyMell(make_packing(), by_forecast=by_forecast, headroom=0.0, relief=0.0, spare=0.0)
        arrivals = [arrival("a", 700, 1150), arrival("b", 750, 750)]
        packer.apply(Operations(arrivals=arrivals))
        packer.apply(Operations(arrivals=[arrival("c", 300, 500)]))
        assert together(packer.packing) == expected


def test_where_nobody_can_take_growth_it_is_preempted() -> None:
    for name in ("mell", "mell-eager", "mell-literal", "mell-forecast"):
        packer = PACKERS[name](make_packing(2))
        arrive(packer, a=900, b=900)
        arrive(packer, c=200, d=200)
        changes = grow(packer, a=1100, b=1100)
        assert len(changes.preempted) == 2, name


def test_a_request_that_moves_twice_goes_straight_to_where_it_ends() -> None:
    packing = make_packing(3)
    packing.begin()
    item = packing.enter(arrival("a", 10))
    packing.put(item, packing.groups["g00"])
    assert packing.finish().placed == {"a": "g00"}
    packing.begin()
    for name in ("g01", "g02"):
        packing.take_out([item])
        packing.put(item, packing.groups[name])
    assert packing.finish().migrations == [Migration("a", "g00", "g02")]
    packing.begin()
    for name in ("g01", "g02"):
        packing.take_out([item])
        packing.put(item, packing.groups[name])
    assert packing.finish().migrations == []


def test_priority_weighs_memory_requests_and_distance() -> None:
    groups = [DeviceGroup(name=name, capacity=1000, host=host) for name, host in (("a", "h"), ("b", "i"))]
    packing = Packing(groups)
    packing.begin()
    for id, size, name in (("x", 100, "a"), ("y", 100, "a"), ("z", 300, "b")):
        packing.put(packing.enter(arrival(id, size)), packing.groups[name])

    def first(host: str | None = None, **weights: float) -> str:
        none = {"idle": 0.0, "requests": 0.0, "distance": 0.0}
        priority = Priority(**(none | weights))
        return max(packing.groups.values(), key=lambda one: priority.of(one, host)).group.name

    assert first(idle=1.0) == "a"
    assert first(requests=1.0) == "b"
    assert [first("h", distance=1.0), first("i", distance=1.0)] == ["a", "b"]
    assert first(None, distance=1.0, idle=0.1) == "a"


def test_the_weights_decide_which_large_request_gets_company() -> None:
    for idle, expected in ((1.0, groups_of("a", "bt")), (-1.0, groups_of("at", "b"))):
        packer = ClassMell(make_packing(), priority=Priority(idle=idle, requests=0.0))
        arrive(packer, a=900, b=700)
        arrive(packer, t=200)
        assert together(packer.packing) == expected


def test_groups_are_activated_largest_first_where_they_host_the_service() -> None:
    packing = Packing(
        [
            DeviceGroup(name="a", capacity=500),
            DeviceGroup(name="b", capacity=900, services=frozenset({"x"})),
            DeviceGroup(name="c", capacity=700),
        ]
    )
    packer = LazyMell(packing)
    arrivals = [arrival("q", 450, service="y"), arrival("r", 450, service="x")]
    assert packer.apply(Operations(arrivals=arrivals)).placed == {"q": "c", "r": "b"}
    assert packing.fewest_groups() == 1
    grown = {"q": Growth(600, 600), "r": Growth(600, 600)}
    packer.apply(Operations(updates=grown))
    assert packing.fewest_groups() == 2


def test_bad_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity must be at least 1"):
        DeviceGroup(name="a", capacity=0)
    with pytest.raises(ConfigError, match="different names"):
        Packing([DeviceGroup(name="a", capacity=1), DeviceGroup(name="a", capacity=2)])
    packer = BestFit(make_packing())
    arrive(packer, a=1)
    with pytest.raises(ValueError, match="a is already running"):
        arrive(packer, a=1)


def test_brute_force_finds_the_fewest_bins() -> None:
    assert fewest_bins([6, 5, 5, 4], 10) == 2
    assert fewest_bins([6, 6, 6], 10) == 3
    assert fewest_bins([], 10) == 0
    assert max(SizeClass) is SizeClass.LARGE
