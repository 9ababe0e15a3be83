"""The size of the fleet: when engines are activated, and when they go to standby."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_builders import SECOND, Bench

from hypothesis_profiles import examples
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.actions import ClusterAction, FleetChanged, Reserve, StartEngine, StopEngine
from shoal.cluster.manager.events import (
    Ended,
    EngineActivated,
    EngineAdded,
    EngineDeactivated,
    EngineDraining,
    MigrationMethod,
    MigrationReserved,
    MigrationStopped,
    MigrationWanted,
    ServiceRemoved,
)
from shoal.cluster.manager.goal_limit import LOWER, PERIOD_NS, RAISE, GoalLimit
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState
from shoal.core import ConfigError


def fleet(dispatch: str = "least-requests", engines: str = "wxyz", **options: object) -> Bench:
    """Engines whose memory holds 1000 tokens each, and that start within a second."""
    found = Bench(ClusterOptions(fleet=FleetOptions(**options), dispatch=dispatch), dispatch)  # type: ignore[arg-type]
    found.kv_format, found.kv_tokens = "k", {"a": 1000}
    found.add(*engines)
    return found


def live(bench: Bench, seconds: float) -> list[ClusterAction]:
    """Time passes; engines that are started are ready, and those that are stopped end, at the next tick."""
    actions: list[ClusterAction] = []
    for _ in range(round(4 * seconds)):
        found = bench.wait(0.25, *((each.name, each.incarnation) for each in bench.manager.engines))
        for each in found:
            if isinstance(each, StopEngine):
                bench.die(each.engine, each.incarnation)
            elif isinstance(each, StartEngine):
                bench.ready(each.engine, each.incarnation)
        actions += found
    return actions


def running(bench: Bench) -> list[str]:
    return [engine.name for engine in bench.manager.engines if engine.state is EngineState.READY]


def changes(actions: Sequence[ClusterAction]) -> list[tuple[str, bool]]:
    return [(each.engine, each.activated) for each in actions if isinstance(each, FleetChanged)]


def test_engines_without_requests_go_to_standby_after_the_idle_time() -> None:
    bench = fleet(min=2, idle_s=10.0)
    assert changes(live(bench, 9)) == []
    assert changes(live(bench, 2)) == [("z", False), ("y", False)]
    assert running(bench) == ["w", "x"]
    assert changes(live(bench, 100)) == []
    assert bench.manager.wanted_engines == 2


def test_without_options_all_engines_run_for_ever() -> None:
    bench = Bench()
    bench.add("x", "y")
    assert not [each for each in live(bench, 500) if isinstance(each, StopEngine)]
    assert bench.manager.wanted_engines == 2


def test_the_kv_that_requests_will_have_decides() -> None:
    """80% of an engine is the aim: 900 tokens take two, 1700 three."""
    bench = fleet(idle_s=5.0)
    live(bench, 10)
    assert running(bench) == ["w"]
    for number in range(7):
        bench.submit(str(number), prompt=50, most=50)
    assert changes(live(bench, 5)) == []
    bench.submit("more", prompt=100, most=100)
    [change] = [each for each in live(bench, 1) if isinstance(each, FleetChanged)]
    assert (change.engine, change.activated, change.wanted) == ("x", True, 2)
    assert "KV" in change.why


def test_waiting_requests_count() -> None:
    """A packer lets requests wait that find no room: they need an engine, too."""
    bench = fleet("best-fit", idle_s=5.0)
    live(bench, 10)
    for number in range(4):
        bench.submit(str(number), prompt=400, most=100)
    assert bench.manager.waiting("a") == 2
    live(bench, 1)
    assert bench.manager.waiting("a") == 0
    assert len(running(bench)) >= 2


def test_the_number_of_requests_decides_where_it_is_bounded() -> None:
    bench = fleet(idle_s=5.0, requests=3)
    live(bench, 10)
    for number in range(4):
        bench.submit(str(number), prompt=1, most=1)
    [change] = [each for each in live(bench, 1) if isinstance(each, FleetChanged)]
    assert (change.activated, change.wanted) == (True, 2)
    assert "4 requests" in change.why


def test_growth_is_expected_to_go_on_for_the_time_of_a_start() -> None:
    """A start is taken to last 10 s before one was seen: a request more each second will be ten more then."""
    bench = fleet(idle_s=5.0, requests=50)
    live(bench, 30)
    for number in range(60):
        bench.submit(str(number), prompt=1, most=1)
        if changes(live(bench, 1)):
            break
    assert number == pytest.approx(50 - 10, abs=2)


def test_a_burst_is_not_taken_for_growth() -> None:
    bench = fleet(idle_s=5.0, requests=10)
    live(bench, 30)
    for number in range(9):
        bench.submit(str(number), prompt=1, most=1)
    assert changes(live(bench, 4)) == []


def test_the_most_engines_are_not_exceeded() -> None:
    bench = fleet(max=2, idle_s=5.0)
    assert changes(live(bench, 6)) != []
    for number in range(30):
        bench.submit(str(number), prompt=50, most=50)
    live(bench, 10)
    assert len(running(bench)) == 2


def test_requests_of_an_engine_that_goes_to_standby_move_away_and_end() -> None:
    bench = fleet(engines="xy", idle_s=5.0)
    bench.submit("1", prompt=100, most=100)
    bench.submit("2", prompt=100, most=100)
    assert [bench.manager.owner(name) for name in "12"] == ["x", "y"]
    actions = live(bench, 6)
    assert changes(actions) == [("y", False)]
    for each in actions:
        if isinstance(each, Reserve):
            bench.emit(MigrationReserved(each.migration), MigrationStopped(each.migration))
            bench.progress(each.request)
    live(bench, 1)
    assert [bench.manager.owner(name) for name in "12"] == ["x", "x"]
    assert running(bench) == ["x"]


def test_a_dead_engine_is_replaced_by_one_on_standby() -> None:
    bench = fleet(min=2, idle_s=5.0)
    live(bench, 10)
    assert running(bench) == ["w", "x"]
    bench.die("x", 1)
    assert changes(bench.wait(0.25, ("w", 1))) == [("y", True)]


def test_the_only_engine_of_a_service_never_goes() -> None:
    bench = Bench(ClusterOptions(fleet=FleetOptions(idle_s=1.0)))
    bench.add("x", services=("a",))
    bench.add("y", services=("b",))
    bench.add("z", services=("a", "b"))
    assert changes(live(bench, 10)) == [("z", False)]


def test_an_engine_that_an_operator_drained_stays_drained() -> None:
    bench = fleet(idle_s=1.0, min=4, requests=1)
    bench.emit(EngineDraining("x"))
    for number in range(20):
        bench.submit(str(number), prompt=1, most=1)
    live(bench, 5)
    assert "x" not in running(bench)


def test_an_engine_that_an_operator_stopped_comes_back_when_it_is_needed() -> None:
    bench = fleet(engines="xy", min=2)
    bench.emit(EngineDeactivated("y"))
    assert changes(live(bench, 0.5)) == [("y", True)]


def test_an_engine_that_an_operator_activated_stays_for_the_idle_time() -> None:
    bench = fleet(engines="xy", idle_s=10.0)
    live(bench, 12)
    assert running(bench) == ["x"]
    for each in bench.emit(EngineActivated("y")):
        assert isinstance(each, StartEngine)
        bench.ready(each.engine, each.incarnation)
    assert changes(live(bench, 9)) == []
    assert changes(live(bench, 2)) == [("y", False)]


def test_a_burst_needs_no_second_start_within_the_idle_time() -> None:
    """Engines stay for the idle time after the last moment in which they were needed."""
    bench = fleet(idle_s=20.0, requests=2)
    live(bench, 30)
    for burst in range(5):
        for number in range(4):
            bench.submit(f"{burst}-{number}", prompt=1, most=1)
        live(bench, 2)
        for number in range(4):
            bench.end(f"{burst}-{number}")
        live(bench, 10)
    starts = next(each for each in bench.manager.engines if each.name == "x").incarnation
    assert starts == 2


# Goals


def test_missed_goals_start_an_engine_and_the_load_is_remembered() -> None:
    """8 requests on one engine miss their goals: it is to have 80% of them, so the eight need two."""
    bench = fleet(idle_s=10.0, attainment=0.9)
    live(bench, 15)
    assert running(bench) == ["w"]
    for second in range(12):
        for number in range(8):
            bench.submit(f"{second}-{number}", prompt=1, most=1)
        live(bench, 1)
        for number in range(8):
            bench.emit(Ended(f"{second}-{number}", 1, met=number < 5 or len(running(bench)) > 1))
    assert len(running(bench)) == 2
    assert bench.manager.wanted_engines == 2


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=40))
@settings(max_examples=examples(100))
def test_the_learned_limit_falls_only_when_goals_are_missed(
    periods: list[tuple[int, float, int]],
) -> None:
    limit, now_ns = GoalLimit(0.9), 0
    for load, share, engines in periods:
        before = limit.per_engine
        limit.observe(load * engines, engines, SECOND, now_ns)
        for number in range(10):
            limit.ended(number < round(10 * share))
        limit.observe(0, engines, SECOND, now_ns)
        now_ns += PERIOD_NS
        limit.observe(0, engines, SECOND, now_ns)
        kept = round(10 * share) >= 9
        if limit.per_engine != before:
            expected = (before or 0) * RAISE if kept else max(1.0, LOWER * load)
            assert limit.per_engine == pytest.approx(expected)
            assert kept <= (before is not None and load >= 0.8 * before)


def test_few_outcomes_say_nothing() -> None:
    limit = GoalLimit(0.9)
    limit.observe(10, 1, SECOND, 0)
    for _ in range(4):
        limit.ended(False)
    limit.observe(10, 1, SECOND, 0)
    limit.observe(10, 1, SECOND, 10 * PERIOD_NS)
    assert limit.per_engine is None
    limit.ended(False)
    limit.observe(10, 1, SECOND, 11 * PERIOD_NS)
    assert limit.per_engine == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"min": 0},
        {"max": 2, "min": 3},
        {"idle_s": -1.0},
        {"kv_share": 0.0},
        {"requests": 0},
        {"attainment": 1.5},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"fleet.{next(iter(wrong)).removesuffix('_s')}"):
        FleetOptions(**wrong)  # type: ignore[arg-type]


def test_a_move_by_hand_does_not_keep_an_engine() -> None:
    """What an engine keeps for a migrating request delays its end, but does not prevent it."""
    bench = fleet(engines="xy", idle_s=5.0)
    bench.submit("1", prompt=10, most=10)
    bench.emit(MigrationWanted("1", "y", MigrationMethod.TOKENS))
    bench.progress("1")
    live(bench, 6)
    assert running(bench) == ["y"]


# Engines of different services, and of different sizes


def two_and_two(**options: object) -> Bench:
    """Two engines of a, two of b; after the idle time one of each runs: w and y."""
    bench = Bench(ClusterOptions(fleet=FleetOptions(idle_s=5.0, **options)))  # type: ignore[arg-type]
    bench.add("w", "x", services=("a",))
    bench.add("y", "z", services=("b",))
    live(bench, 8)
    assert running(bench) == ["w", "y"]
    return bench


def test_engines_of_the_service_that_needs_them_are_activated() -> None:
    bench = two_and_two(requests=4)
    for number in range(6):
        bench.submit(str(number), "b")
    live(bench, 1)
    assert running(bench) == ["w", "y", "z"]


def crash(bench: Bench, name: str, seconds: float) -> list[ClusterAction]:
    """Time passes in which an engine dies at each start."""
    actions: list[ClusterAction] = []
    for _ in range(round(4 * seconds)):
        found = bench.wait(0.25, *((each.name, each.incarnation) for each in bench.manager.engines))
        for each in found:
            if isinstance(each, StopEngine):
                bench.die(each.engine, each.incarnation)
            elif isinstance(each, StartEngine):
                act = bench.die if each.engine == name else bench.ready
                actions += act(each.engine, each.incarnation)
        actions += found
    return actions


def test_a_dead_engine_is_replaced_by_one_of_its_service() -> None:
    bench = two_and_two()
    bench.submit("r", "b")
    bench.die("y", 1)
    crash(bench, "y", 5)
    assert bench.manager.owner("r") == "z"


def test_the_only_engine_of_a_service_that_works_stays() -> None:
    """Another one has it, but dies at each start."""
    bench = Bench(ClusterOptions(fleet=FleetOptions(idle_s=5.0)))
    bench.add("x", "y")
    bench.add("z", services=("b",))
    live(bench, 1)
    bench.die("y", 1)
    crash(bench, "y", 60)
    assert {"x", "z"} <= set(running(bench))


def test_a_request_that_only_an_engine_on_standby_holds_waits_for_it() -> None:
    bench = Bench(ClusterOptions(fleet=FleetOptions(idle_s=5.0)))
    for name, tokens in (("small", 100), ("large", 1000)):
        bench.kv_tokens = {"a": tokens}
        bench.add(name)
    live(bench, 8)
    assert running(bench) == ["small"]
    assert bench.submit("r", prompt=400, most=100) == []
    live(bench, 1)
    assert bench.manager.owner("r") == "large"


def test_an_engine_that_is_drained_on_standby_is_left_alone() -> None:
    bench = fleet(engines="xy", idle_s=5.0, requests=1)
    live(bench, 8)
    bench.emit(EngineDraining("y"))
    for number in range(5):
        bench.submit(str(number), prompt=1, most=1)
    live(bench, 5)
    assert running(bench) == ["x"]


def test_an_engine_without_services_is_not_activated() -> None:
    bench = two_and_two(requests=1)
    bench.emit(ServiceRemoved("b"))
    live(bench, 2)
    for number in range(5):
        bench.submit(str(number))
    started = [each for each in live(bench, 2) if isinstance(each, StartEngine)]
    assert [each.engine for each in started] == ["x"]


def test_an_engine_that_is_needed_while_it_ends_counts_as_the_one_that_comes() -> None:
    bench = fleet(engines="xyz", idle_s=5.0, requests=4)
    actions: list[ClusterAction] = []
    while len(actions) < 2:
        beats = [(each.name, each.incarnation) for each in bench.manager.engines]
        actions += [each for each in bench.wait(0.25, *beats) if isinstance(each, StopEngine)]
    bench.die("z", 1)  # the end of y takes longer
    for number in range(6):
        bench.submit(str(number), prompt=1, most=1)
    live(bench, 1)
    bench.die("y", 1)
    live(bench, 1)
    assert running(bench) == ["x", "y"]
    assert next(each.restarts for each in bench.manager.engines if each.name == "y") == 0


def test_goals_are_missed_at_the_load_of_engines_that_had_the_requests() -> None:
    """One engine has all eight while another one loads: its load is eight, not four."""
    bench = fleet(engines="x", attainment=0.9)
    bench.emit(EngineAdded("y", ("a",)))
    for number in range(8):
        bench.submit(str(number), prompt=1, most=1)
    for number in range(40):
        bench.wait(0.5, ("x", 1))
        bench.emit(Ended(str(number), 5, False))
        bench.submit(str(number + 8), prompt=1, most=1)
    limit = bench.manager._sizer._goals.per_engine  # type: ignore[union-attr]
    assert limit == pytest.approx(LOWER * 8, rel=0.2)
