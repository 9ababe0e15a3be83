"""Services that a manager lets engines load and unload."""

from manager_builders import SPEED, Bench

from shoal.cluster.actions import LoadService, UnloadService
from shoal.cluster.events import ServiceLoaded, ServicePlaced, ServiceUnloaded
from shoal.cluster.status import ServiceState


def changes(actions):
    return [action for action in actions if isinstance(action, LoadService | UnloadService)]


def test_the_time_of_loading_is_not_idle():
    bench = Bench()
    bench.add("x")
    load = LoadService("x", 1, "b")
    assert changes(bench.tell(ServicePlaced("b", ("x",), 2.0))) == [load]
    assert changes(bench.wait(5, ("x", 1))) == []
    assert bench.manager.service("b").state is ServiceState.LOADING
    bench.tell(ServiceLoaded("x", 1, "b", SPEED))
    assert changes(bench.wait(1, ("x", 1))) == []
    unload = UnloadService("x", 1, "b")
    assert changes(bench.wait(2, ("x", 1))) == [unload]
    bench.tell(ServiceUnloaded("x", 1, "b"))
    assert bench.manager.service("b").state is ServiceState.UNLOADED
    assert changes(bench.submit("r", "b")) == [LoadService("x", 1, "b", woken=True)]
    assert changes(bench.wait(5, ("x", 1))) == []
