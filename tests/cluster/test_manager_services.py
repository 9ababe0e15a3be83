"""Services that a manager lets engines load and unload."""

from manager_builders import SPEED, Bench

from shoal.cluster.manager.actions import LoadService, StartEngine, UnloadService
from shoal.cluster.manager.events import (
    Ended,
    ServiceKept,
    ServiceLoaded,
    ServicePlaced,
    ServiceUnloaded,
    ServiceWanted,
)
from shoal.cluster.status import ServiceState


def changes(actions):
    return [action for action in actions if isinstance(action, LoadService | UnloadService)]


def test_the_time_of_loading_is_not_idle():
    bench = Bench()
    bench.add("x")
    load = LoadService("x", 1, "b")
    assert changes(bench.emit(ServicePlaced("b", ("x",), 2.0))) == [load]
    assert changes(bench.wait(5, ("x", 1))) == []
    assert bench.manager.service("b").state is ServiceState.LOADING
    bench.emit(ServiceLoaded("x", 1, "b", SPEED))
    assert changes(bench.wait(1, ("x", 1))) == []
    unload = UnloadService("x", 1, "b")
    assert changes(bench.wait(2, ("x", 1))) == [unload]
    bench.emit(ServiceUnloaded("x", 1, "b"))
    assert bench.manager.service("b").state is ServiceState.UNLOADED
    assert changes(bench.submit("r", "b")) == [LoadService("x", 1, "b", woken=True)]
    assert changes(bench.wait(5, ("x", 1))) == []


def loaded_service(idle_after_s):
    bench = Bench()
    bench.add("x")
    bench.emit(ServicePlaced("b", ("x",), idle_after_s), ServiceLoaded("x", 1, "b", SPEED))
    return bench


UNLOAD = UnloadService("x", 1, "b")


def test_what_is_kept_for_no_time_is_unloaded_at_once():
    bench = loaded_service(None)
    assert changes(bench.wait(100, ("x", 1))) == []
    assert changes(bench.emit(ServiceKept("b", 0.0))) == [UNLOAD]
    assert bench.manager.service("b").state is ServiceState.DRAINING
    bench.emit(ServiceUnloaded("x", 1, "b"))
    assert changes(bench.emit(ServiceKept("b", 0.0))) == []


def test_what_has_requests_is_unloaded_when_they_have_ended():
    bench = loaded_service(None)
    bench.submit("r", "b")
    assert changes(bench.emit(ServiceKept("b", 0.0))) == []
    assert bench.manager.service("b").state is ServiceState.READY
    assert changes(bench.emit(Ended("r")) + bench.wait(1, ("x", 1))) == [UNLOAD]


def test_the_time_that_a_service_is_kept_holds_until_it_is_unloaded():
    bench = loaded_service(100.0)
    bench.wait(50, ("x", 1))
    assert changes(bench.emit(ServiceKept("b", 2.0))) == []
    assert changes(bench.wait(1, ("x", 1))) == []
    assert bench.manager.service("b").idle_after_s == 2
    bench.submit("r", "b")
    assert bench.manager.service("b").idle_since_ns is None
    assert changes(bench.wait(5, ("x", 1))) == []
    bench.emit(Ended("r"))
    assert bench.manager.service("b").idle_since_ns == bench.now_ns
    assert changes(bench.wait(3, ("x", 1))) == [UNLOAD]
    bench.emit(ServiceUnloaded("x", 1, "b"))
    assert bench.manager.service("b").idle_after_s == 100
    bench.submit("s", "b")
    bench.emit(ServiceLoaded("x", 1, "b", SPEED), Ended("s"))
    assert changes(bench.wait(50, ("x", 1))) == []


def test_what_is_kept_for_ever_is_not_unloaded():
    bench = loaded_service(2.0)
    bench.emit(ServiceKept("b", None))
    assert changes(bench.wait(1000, ("x", 1))) == []
    assert bench.manager.service("b").idle_after_s is None


def test_unknown_services_cannot_be_kept():
    assert Bench().emit(ServiceKept("none", 0.0)) == []


def test_an_engine_that_ends_comes_back_with_what_still_has_requests():
    """A service is to be unloaded, and a request that it had before goes on after the end of its engine."""
    bench = loaded_service(None)
    bench.submit("r", "b")
    assert changes(bench.emit(ServiceWanted("b", False))) == []
    actions = bench.die("x", 1) + bench.wait(100)
    (start,) = [action for action in actions if isinstance(action, StartEngine)]
    assert "b" in start.services
    bench.end("r")
    bench.die("x", 2)
    (again,) = [action for action in bench.wait(100) if isinstance(action, StartEngine)]
    assert "b" not in again.services
