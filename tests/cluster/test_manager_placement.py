"""Placing services on single engines, and engines on standby: what a manager orders, and when."""

from collections.abc import Sequence

import pytest
from manager_builders import SPEED, Bench, dispatched

from shoal.cluster.manager.actions import (
    ClusterAction,
    KillEngine,
    LoadService,
    Reserve,
    StartEngine,
    StopEngine,
    UnloadService,
)
from shoal.cluster.manager.events import (
    EngineActivated,
    EngineAdded,
    EngineDeactivated,
    EngineDraining,
    EngineUndrained,
    MigrationReserved,
    MigrationStopped,
    PlacementWanted,
    ServiceFailed,
    ServiceLoaded,
    ServiceRemoved,
    ServiceUnloaded,
)
from shoal.cluster.status import EngineState


@pytest.fixture
def bench() -> Bench:
    """Engines x and y, both of which serve a and b; KV can go from one to the other."""
    found = Bench()
    found.kv_format = "k"
    found.add("x", "y", services=("a", "b"))
    return found


def of(kind: type, actions: Sequence[ClusterAction]) -> list[ClusterAction]:
    return [each for each in actions if isinstance(each, kind)]


def placed(bench: Bench) -> dict[str, tuple[str, ...]]:
    return {engine.name: engine.placed for engine in bench.manager.engines}


def declared(bench: Bench) -> dict[str, tuple[str, ...]]:
    return {engine.name: engine.services for engine in bench.manager.engines}


def states(bench: Bench) -> dict[str, EngineState]:
    return {engine.name: engine.state for engine in bench.manager.engines}


def move(bench: Bench, actions: Sequence[ClusterAction]) -> list[ClusterAction]:
    """The migrations that were begun go on to the end."""
    found: list[ClusterAction] = []
    for each in actions:
        if isinstance(each, Reserve):
            bench.emit(MigrationReserved(each.migration), MigrationStopped(each.migration))
            found += bench.progress(each.request)
    return found


# One service on one engine


def test_a_service_leaves_an_engine_that_has_none_of_its_requests(bench: Bench) -> None:
    assert bench.emit(PlacementWanted("a", "x", False)) == [UnloadService("x", 1, "a")]
    assert placed(bench) == {"x": ("b",), "y": ("a", "b")}
    bench.emit(ServiceUnloaded("x", 1, "a"))
    assert declared(bench) == {"x": ("b",), "y": ("a", "b")}
    assert [engine for _, engine, _ in dispatched(bench.submit("1") + bench.submit("2"))] == ["y", "y"]


def test_requests_of_a_service_move_away_before_it_is_unloaded(bench: Bench) -> None:
    bench.submit("1")
    bench.submit("other", "b")  # at y
    bench.submit("2", "b")
    assert bench.manager.owner("1") == bench.manager.owner("2") == "x"
    actions = bench.emit(PlacementWanted("a", "x", False))
    assert [each.request for each in of(Reserve, actions)] == ["1"]  # type: ignore[attr-defined]
    assert not of(UnloadService, actions)
    assert move(bench, actions)[-1] == UnloadService("x", 1, "a")
    assert bench.manager.owner("1") == "y"
    assert bench.manager.owner("2") == "x"


def test_kv_that_is_kept_for_a_move_stays_until_the_move_is_over(bench: Bench) -> None:
    """The source keeps the KV of a request until its first token at the destination."""
    bench.submit("1")
    [reserve] = of(Reserve, bench.emit(PlacementWanted("a", "x", False)))
    assert isinstance(reserve, Reserve)
    bench.emit(MigrationReserved(reserve.migration))
    assert not of(UnloadService, bench.emit(MigrationStopped(reserve.migration)))
    assert bench.manager.owner("1") == "y"
    assert of(UnloadService, bench.progress("1"))


def test_the_last_engine_of_a_service_keeps_it(bench: Bench) -> None:
    bench.emit(PlacementWanted("a", "x", False))
    assert bench.emit(PlacementWanted("a", "y", False)) == []
    assert placed(bench)["y"] == ("a", "b")


@pytest.mark.parametrize("gone", [EngineDraining("y"), EngineDeactivated("y")])
def test_engines_that_do_not_stay_do_not_count(
    bench: Bench, gone: EngineDraining | EngineDeactivated
) -> None:
    bench.emit(gone)
    bench.emit(PlacementWanted("a", "x", False))
    assert placed(bench)["x"] == ("a", "b")


def test_an_engine_that_failed_to_load_a_service_does_not_count(bench: Bench) -> None:
    bench.emit(PlacementWanted("a", "x", False), ServiceUnloaded("x", 1, "a"))
    bench.emit(PlacementWanted("a", "x", True), ServiceFailed("x", 1, "a", "no memory"))
    bench.emit(PlacementWanted("a", "y", False))
    assert placed(bench)["y"] == ("a", "b")


def test_a_service_that_is_placed_again_is_loaded_and_served(bench: Bench) -> None:
    bench.emit(PlacementWanted("a", "x", False), ServiceUnloaded("x", 1, "a"))
    assert bench.emit(PlacementWanted("a", "x", True)) == [LoadService("x", 1, "a")]
    assert dispatched(bench.submit("1")) == [("1", "y", 1)]
    bench.emit(ServiceLoaded("x", 1, "a", SPEED, "k"))
    assert dispatched(bench.submit("2")) == [("2", "x", 1)]


def test_a_service_that_is_placed_again_before_it_is_unloaded_stays(bench: Bench) -> None:
    bench.submit("1")
    actions = bench.emit(PlacementWanted("a", "x", False))
    bench.emit(PlacementWanted("a", "x", True))
    assert not of(UnloadService, move(bench, actions))
    assert placed(bench)["x"] == ("a", "b")


def test_a_service_that_is_placed_again_while_it_is_unloaded_is_loaded_after_that(bench: Bench) -> None:
    bench.emit(PlacementWanted("a", "x", False))
    assert bench.emit(PlacementWanted("a", "x", True)) == []
    assert bench.emit(ServiceUnloaded("x", 1, "a")) == [LoadService("x", 1, "a")]


def test_an_engine_keeps_one_service_loaded(bench: Bench) -> None:
    """An engine needs a service to start; the last one stays until there is another."""
    bench.emit(PlacementWanted("a", "x", False), ServiceUnloaded("x", 1, "a"))
    assert bench.emit(PlacementWanted("b", "x", False)) == []
    assert (placed(bench)["x"], declared(bench)["x"]) == ((), ("b",))
    assert dispatched(bench.submit("1", "b")) == [("1", "y", 1)]
    actions = bench.emit(PlacementWanted("a", "x", True))
    assert set(actions) == {LoadService("x", 1, "a"), UnloadService("x", 1, "b")}


def test_a_service_may_stay_loaded_where_it_takes_no_requests(bench: Bench) -> None:
    bench.submit("1")
    actions = bench.emit(PlacementWanted("a", "x", False, unload=False))
    assert not of(UnloadService, move(bench, actions) + bench.wait(2, ("x", 1), ("y", 1)))
    assert declared(bench)["x"] == ("a", "b")
    assert dispatched(bench.submit("2")) == [("2", "y", 1)]
    assert bench.emit(PlacementWanted("a", "x", True)) == []
    assert dispatched(bench.submit("3")) == [("3", "x", 1)]


def test_an_engine_that_dies_before_it_unloads_starts_without_the_service(bench: Bench) -> None:
    bench.submit("1")
    bench.emit(PlacementWanted("a", "x", False))
    bench.die("x", 1)
    assert declared(bench)["x"] == ("b",)
    assert of(StartEngine, bench.wait(2, ("y", 1))) == [StartEngine("x", 2, ("b",))]


def test_a_move_to_an_engine_that_loses_the_service_is_given_up() -> None:
    bench = Bench()
    bench.kv_format = "k"
    bench.add("x", "y", "z", services=("a", "b"))
    bench.submit("1")
    actions = bench.emit(EngineDraining("x"))
    [reserve] = of(Reserve, actions)
    assert isinstance(reserve, Reserve)
    bench.emit(PlacementWanted("a", reserve.engine, False))
    bench.emit(MigrationReserved(reserve.migration))
    assert bench.manager.owner("1") == "x"
    again = of(Reserve, bench.wait(2, ("x", 1), ("y", 1), ("z", 1)))
    assert [each.engine for each in again if isinstance(each, Reserve)] == ["z"]


def test_a_request_that_waits_for_the_only_engine_keeps_waiting(bench: Bench) -> None:
    """The engine that is no longer one of its service does not count as one that is ready."""
    bench.emit(PlacementWanted("a", "x", False), ServiceUnloaded("x", 1, "a"))
    bench.die("y", 1)
    assert dispatched(bench.submit("1")) == []
    assert bench.manager.service("a").ready == 0
    bench.wait(2, ("x", 1))
    assert dispatched(bench.ready("y", 2)) == [("1", "y", 1)]


def test_unknown_names_change_nothing(bench: Bench) -> None:
    before = declared(bench)
    assert bench.emit(PlacementWanted("a", "nowhere", True), PlacementWanted("c", "x", True)) == []
    assert declared(bench) == before


# Standby


def test_an_idle_engine_goes_to_standby_at_once_and_stays_there(bench: Bench) -> None:
    assert bench.emit(EngineDeactivated("x")) == [StopEngine("x", 1)]
    bench.die("x", 1)
    assert states(bench) == {"x": EngineState.STANDBY, "y": EngineState.READY}
    assert bench.wait(100, ("y", 1)) == []
    assert dispatched(bench.submit("1") + bench.submit("2")) == [("1", "y", 1), ("2", "y", 1)]


def test_an_engine_ends_when_its_requests_have_moved_away(bench: Bench) -> None:
    bench.submit("1")
    actions = bench.emit(EngineDeactivated("x"))
    assert not of(StopEngine, actions)
    move(bench, actions)
    assert of(StopEngine, bench.wait(0.25, ("x", 1), ("y", 1))) == [StopEngine("x", 1)]
    assert not of(StopEngine, bench.wait(1, ("x", 1), ("y", 1)))
    assert bench.manager.owner("1") == "y"


def test_an_engine_on_standby_is_started_when_it_is_activated(bench: Bench) -> None:
    bench.emit(EngineDeactivated("x"))
    bench.die("x", 1)
    assert bench.emit(EngineActivated("x")) == [StartEngine("x", 2, ("a", "b"))]
    assert bench.emit(EngineActivated("x")) == []
    bench.ready("x", 2)
    assert dispatched(bench.submit("1")) == [("1", "x", 1)]
    [x, _] = bench.manager.engines
    assert (x.restarts, x.last_error) == (0, None)


def test_an_engine_that_drains_to_go_to_standby_can_be_kept(bench: Bench) -> None:
    bench.submit("1")
    bench.emit(EngineDeactivated("x"), EngineActivated("x"))
    assert states(bench)["x"] is EngineState.READY
    assert not of(StopEngine, bench.wait(2, ("x", 1), ("y", 1)))


def test_an_engine_that_is_activated_while_it_ends_starts_again(bench: Bench) -> None:
    bench.emit(EngineDeactivated("x"), EngineActivated("x"))
    assert dispatched(bench.submit("1")) == [("1", "y", 1)]  # x is ending
    bench.die("x", 1)
    assert of(StartEngine, bench.wait(0.25, ("y", 1))) == [StartEngine("x", 2, ("a", "b"))]


def test_an_engine_that_is_drained_while_it_ends_stays_drained(bench: Bench) -> None:
    bench.emit(EngineDeactivated("x"), EngineDraining("x"))
    bench.die("x", 1)
    assert states(bench)["x"] is EngineState.DRAINING
    bench.emit(EngineUndrained("x"))
    assert of(StartEngine, bench.wait(0.25, ("y", 1))) == [StartEngine("x", 2, ("a", "b"))]


def test_an_engine_that_dies_on_its_way_to_standby_stays_there(bench: Bench) -> None:
    bench.submit("1")
    bench.emit(EngineDeactivated("x"))
    assert dispatched(bench.die("x", 1)) == [("1", "y", 2)]
    assert states(bench)["x"] is EngineState.STANDBY


def test_the_last_engine_of_a_service_does_not_go_to_standby(bench: Bench) -> None:
    bench.emit(PlacementWanted("a", "y", False))
    assert bench.emit(EngineDeactivated("x")) == []
    assert states(bench)["x"] is EngineState.READY
    bench.emit(EngineDeactivated("y"))
    assert states(bench)["y"] is EngineState.DRAINING


def test_an_engine_that_waits_for_its_restart_goes_to_standby_at_once(bench: Bench) -> None:
    bench.die("x", 1)
    assert bench.emit(EngineDeactivated("x")) == []
    assert states(bench)["x"] is EngineState.STANDBY
    assert bench.wait(10, ("y", 1)) == []


def test_an_engine_that_is_loading_goes_to_standby_without_getting_ready() -> None:
    bench = Bench()
    bench.add("y")
    bench.emit(EngineAdded("x", ("a",)))
    assert bench.emit(EngineDeactivated("x")) == [StopEngine("x", 1)]
    bench.ready("x", 1)
    assert dispatched(bench.submit("1") + bench.submit("2")) == [("1", "y", 1), ("2", "y", 1)]


def test_a_service_that_is_removed_leaves_an_engine_on_standby(bench: Bench) -> None:
    bench.emit(EngineDeactivated("x"))
    bench.die("x", 1)
    bench.emit(PlacementWanted("a", "x", False))
    assert declared(bench)["x"] == ("b",)
    assert bench.emit(EngineActivated("x")) == [StartEngine("x", 2, ("b",))]


def test_no_engine_is_killed_for_its_standby(bench: Bench) -> None:
    """A stopped engine sends no more heartbeats, which is no reason to kill it."""
    actions = bench.emit(EngineDeactivated("x")) + bench.wait(60, ("y", 1))
    assert not of(KillEngine, actions)


def test_an_engine_that_loses_all_its_services_at_once_keeps_one_loaded(bench: Bench) -> None:
    actions = bench.emit(PlacementWanted("a", "x", False), PlacementWanted("b", "x", False))
    assert actions == [UnloadService("x", 1, "a")]
    bench.emit(ServiceUnloaded("x", 1, "a"))
    assert (placed(bench)["x"], declared(bench)["x"]) == ((), ("b",))


def test_a_drained_engine_may_go_to_standby(bench: Bench) -> None:
    bench.emit(EngineDraining("x"))
    assert bench.emit(EngineDeactivated("x")) == [StopEngine("x", 1)]
    bench.die("x", 1)
    assert states(bench)["x"] is EngineState.STANDBY


def test_a_drained_engine_on_standby_runs_only_when_it_is_undrained(bench: Bench) -> None:
    bench.emit(EngineDeactivated("x"))
    bench.die("x", 1)
    assert bench.emit(EngineDraining("x"), EngineActivated("x")) == []
    assert states(bench)["x"] is EngineState.DRAINING
    bench.emit(EngineUndrained("x"))
    assert of(StartEngine, bench.wait(0.25, ("y", 1))) == [StartEngine("x", 2, ("a", "b"))]


def test_an_engine_whose_services_are_gone_does_not_start() -> None:
    bench = Bench()
    bench.add("x")
    bench.add("y", services=("b",))
    bench.emit(ServiceRemoved("b"), ServiceUnloaded("y", 1, "b"))
    bench.die("y", 1)
    assert of(StartEngine, bench.wait(30, ("x", 1))) == []
    bench.emit(PlacementWanted("a", "y", True))
    assert of(StartEngine, bench.wait(0.25, ("x", 1))) == [StartEngine("y", 2, ("a",))]
