"""What a manager does when engines begin, end, fall silent or leave."""

import pytest
from manager_builders import SECOND, SPEED, Bench, dispatched

from shoal.cluster.manager.actions import (
    ClusterAction,
    Dispatch,
    KillEngine,
    RefusalKind,
    Refuse,
    StartEngine,
    Withdraw,
)
from shoal.cluster.manager.events import (
    EngineAdded,
    EngineDraining,
    EngineFound,
    EngineHeartbeat,
    EngineLoading,
    EngineProcessUsage,
    EngineReady,
    EngineRemoved,
    EngineUndrained,
    ServiceLoaded,
    ServicePlaced,
    ServiceUnloaded,
    ServiceWanted,
    Ticked,
)
from shoal.cluster.options import ClusterOptions, RestartOptions
from shoal.cluster.status import EngineState, ServiceState, ServiceStatus


def states(bench: Bench) -> dict[str, EngineState]:
    return {engine.name: engine.state for engine in bench.manager.engines}


def test_an_engine_is_started_and_gets_requests_once_it_is_ready() -> None:
    bench = Bench()
    assert bench.emit(EngineAdded("e0", ("a",))) == [StartEngine("e0", 1, ("a",))]
    assert bench.submit("r0") == []
    assert bench.manager.service("a") == ServiceStatus(
        ready=0, wanted=1, waiting=1, state=ServiceState.LOADING
    )
    assert bench.ready("e0", 1) == [Dispatch("r0", "e0", 1, 1)]
    assert bench.submit("r1") == [Dispatch("r1", "e0", 1, 1)]
    [engine] = bench.manager.engines
    assert (engine.state, engine.requests, engine.incarnation) == (EngineState.READY, 2, 1)
    assert bench.end("r0") == []
    assert bench.manager.engines[0].requests == 1


def test_an_engine_that_was_found_is_not_started() -> None:
    bench = Bench()
    assert bench.emit(EngineFound("e0", 3, ("a",))) == []
    assert bench.emit(EngineReady("e0", 3, {"a": SPEED})) == []
    assert bench.submit("r0") == [Dispatch("r0", "e0", 3, 1)]
    assert bench.die("e0", 3) == []
    assert bench.wait(1) == [StartEngine("e0", 4, ("a",))]


def test_requests_of_a_dead_engine_go_on_at_once_where_they_can() -> None:
    bench = Bench()
    bench.add("e0", "e1")
    for number in range(4):
        bench.submit(f"r{number}")
    assert bench.die("e0", 1) == [Dispatch("r0", "e1", 1, 2), Dispatch("r2", "e1", 1, 2)]
    assert bench.manager.engines[0].last_error == "killed by signal 9"
    assert bench.die("e1", 1) == []
    assert bench.submit("r4") == []
    assert bench.manager.waiting("a") == 5
    assert bench.wait(0.75) == []
    assert bench.wait(0.25) == [StartEngine("e0", 2, ("a",)), StartEngine("e1", 2, ("a",))]
    sent = dispatched(bench.ready("e1", 2))
    assert sent == [("r0", "e1", 3), ("r1", "e1", 2), ("r2", "e1", 3), ("r3", "e1", 2), ("r4", "e1", 1)]


def test_waits_between_starts_grow_until_one_works_out() -> None:
    bench = Bench(ClusterOptions(restart=RestartOptions(first_s=1, factor=2, max_s=5)))
    bench.add("e0")
    for incarnation, wait_s in enumerate([1, 2, 4, 5, 5], start=1):
        bench.die("e0", incarnation)
        assert bench.wait(wait_s - 0.25) == []
        assert bench.wait(0.25) == [StartEngine("e0", incarnation + 1, ("a",))]
    bench.ready("e0", 6)
    bench.wait(4.75, ("e0", 6))
    bench.die("e0", 6)
    assert bench.wait(4.75) == []
    assert bench.wait(0.25) == [StartEngine("e0", 7, ("a",))]
    bench.ready("e0", 7)
    bench.wait(5, ("e0", 7))
    bench.die("e0", 7)
    assert bench.wait(1) == [StartEngine("e0", 8, ("a",))]
    assert bench.manager.engines[0].restarts == 7


def test_a_silent_engine_is_killed_once_and_its_requests_resume_when_it_is_gone() -> None:
    bench = Bench()
    bench.add("e0", "e1")
    bench.submit("r0")
    assert bench.wait(10, ("e1", 1)) == []
    [kill] = bench.wait(0.25, ("e1", 1))
    assert isinstance(kill, KillEngine)
    assert (kill.engine, kill.incarnation) == ("e0", 1)
    assert bench.wait(20, ("e1", 1)) == []
    assert bench.emit(EngineHeartbeat("e0", 1, hung="a step stands still")) == []
    assert dispatched(bench.submit("r1")) == [("r1", "e1", 1)]
    assert bench.die("e0", 1, "r0") == [Dispatch("r0", "e1", 1, 2)]


def test_a_pause_of_the_manager_is_not_counted_as_silence() -> None:
    bench = Bench()
    bench.add("e0")
    for _ in range(10):
        bench.now_ns += 3600 * SECOND
        assert bench.emit(Ticked()) == []
    assert bench.wait(5) == []
    assert len(bench.wait(0.5)) == 1


def test_an_engine_whose_step_never_ends_is_killed() -> None:
    bench = Bench()
    bench.add("e0")
    why = "a step stands still"
    assert bench.emit(EngineHeartbeat("e0", 1, hung=why)) == [KillEngine("e0", 1, why)]
    assert bench.emit(EngineHeartbeat("e0", 1, hung=why)) == []


def test_silence_is_not_counted_without_ticks() -> None:
    """Heartbeats and usage come from the node, which may be late."""
    bench = Bench()
    bench.add("e0")
    process = Working(bench)
    assert process.wait(5) == []
    assert bench.wait(9) == []
    process.cpu_s += 0.5
    assert process.wait(1) == []
    [kill] = bench.wait(11)
    assert isinstance(kill, KillEngine)


class Working:
    """Engine e0 of a bench as others see it: what its process has used."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cpu_s = 0.0
        self.read_bytes = 0

    def wait(self, seconds: float, share: float = 0.0, bytes_per_s: int = 0) -> list[ClusterAction]:
        """Time passes in which it uses a share of a core, reads, and sends nothing."""
        actions: list[ClusterAction] = []
        for _ in range(round(seconds)):
            self.cpu_s += share
            self.read_bytes += bytes_per_s
            actions += self.bench.emit(EngineProcessUsage("e0", 1, self.cpu_s, self.read_bytes))
            actions += self.bench.wait(1)
        return actions


@pytest.mark.parametrize("share", [0.02, 1.0, 8.0])
def test_a_silent_engine_that_uses_cpu_time_is_not_killed_soon(share: float) -> None:
    bench = Bench()
    bench.add("e0")
    process = Working(bench)
    assert process.wait(190, share) == []
    bench.emit(EngineHeartbeat("e0", 1))
    [kill] = process.wait(13)
    assert isinstance(kill, KillEngine)
    assert "it was silent, and used 0.00 s of CPU time in 11.0 s" in kill.why
    assert "(the limit, cluster.hung_after, is 10 s)" in kill.why


def test_an_engine_that_is_silent_and_computes_for_ever_is_killed() -> None:
    bench = Bench()
    bench.add("e0")
    [kill] = Working(bench).wait(210, 1.0)
    assert isinstance(kill, KillEngine)
    assert "(the limit is 20 times cluster.hung_after, 10 s)" in kill.why


@pytest.mark.parametrize("how", ["cpu", "disk", "told"])
def test_an_engine_that_makes_progress_in_loading_is_not_killed(how: str) -> None:
    bench = Bench(ClusterOptions(load_timeout_s=30))
    bench.emit(EngineAdded("e0", ("a",)))
    process = Working(bench)
    for part in range(20):
        if how == "told":
            bench.emit(EngineLoading("e0", 1, f"downloading: {part}%"))
        share, bytes_per_s = 0.02 * (how == "cpu"), 1000 * (how == "disk")
        assert process.wait(29, share, bytes_per_s) == []
    assert bench.ready("e0", 1) == []
    assert states(bench) == {"e0": EngineState.READY}


def test_an_engine_that_loads_and_hangs_is_killed_and_the_log_says_by_which_limit() -> None:
    bench = Bench(ClusterOptions(load_timeout_s=30))
    bench.emit(EngineAdded("e0", ("a",)))
    process = Working(bench)
    assert process.wait(50, 1.0) == []
    bench.emit(EngineLoading("e0", 1, "loading smollm2"))
    [kill] = process.wait(32)
    assert isinstance(kill, KillEngine)
    assert (
        "it did not get on with loading (loading smollm2), and used 0.00 s of CPU time in 31.0 s" in kill.why
    )
    assert "(the limit, cluster.load_timeout, is 30 s)" in kill.why


def test_an_engine_that_loads_one_model_for_ever_is_killed_by_its_cpu_time() -> None:
    bench = Bench(ClusterOptions(load_timeout_s=30))
    bench.emit(EngineAdded("e0", ("a",)))
    process = Working(bench)
    for part in range(3):
        bench.emit(EngineLoading("e0", 1, f"loading model {part}"))
        assert process.wait(590, 4.0) == []
    [kill] = process.wait(20, 4.0)
    assert isinstance(kill, KillEngine)
    assert "(the limit is 20 times cluster.load_timeout, 30 s)" in kill.why


def test_an_engine_that_loads_for_too_long_is_killed() -> None:
    bench = Bench(ClusterOptions(load_timeout_s=30))
    bench.emit(EngineAdded("e0", ("a",)))
    assert bench.wait(30) == []
    [kill] = bench.wait(0.25)
    assert isinstance(kill, KillEngine)
    assert bench.ready("e0", 1) == []
    assert states(bench) == {"e0": EngineState.READY}
    bench.die("e0", 1)
    assert bench.wait(1) == [StartEngine("e0", 2, ("a",))]
    bench.emit(EngineHeartbeat("e0", 2))
    assert bench.wait(29) == []  # imports may hold up its heartbeats
    assert len(bench.wait(1.25)) == 1


def test_requests_are_refused_when_no_engine_comes() -> None:
    bench = Bench(ClusterOptions(wait_for_engine_s=5))
    bench.emit(EngineAdded("e0", ("a",)))
    bench.submit("r0")
    bench.wait(2)
    bench.submit("r1")
    assert bench.wait(2.75) == []
    [refused] = bench.wait(0.25)
    assert refused == Refuse("r0", RefusalKind.NO_ENGINE, "no engine of service 'a' was ready for 5 s")
    assert bench.end("r0") == []
    assert dispatched(bench.ready("e0", 1)) == [("r1", "e0", 1)]


def test_a_draining_engine_keeps_requests_that_no_other_serves_and_is_not_restarted() -> None:
    bench = Bench()
    bench.add("e0", services=("a", "b"))
    bench.add("e1")
    bench.submit("r0", "b")
    assert bench.emit(EngineDraining("e0"), EngineDraining("e0")) == []
    assert bench.manager.owner("r0") == "e0"
    assert dispatched(bench.submit("r1")) == [("r1", "e1", 1)]
    assert bench.manager.service("a") == ServiceStatus(ready=1, wanted=1, waiting=0)
    assert bench.die("e0", 1) == []
    assert bench.wait(5, ("e1", 1)) == []
    assert states(bench)["e0"] is EngineState.DRAINING


def test_an_engine_that_is_undrained_takes_what_waits() -> None:
    bench = Bench()
    bench.add("e0")
    bench.emit(EngineDraining("e0"))
    assert bench.submit("r0") == []
    assert bench.emit(EngineUndrained("e0")) == [Dispatch("r0", "e0", 1, 1)]
    assert states(bench) == {"e0": EngineState.READY}
    assert bench.emit(EngineUndrained("e0"), EngineUndrained("x")) == []


@pytest.mark.parametrize("loaded_while_drained", [True, False])
def test_an_engine_may_be_drained_and_undrained_while_it_loads(loaded_while_drained: bool) -> None:
    bench = Bench()
    bench.emit(EngineAdded("e0", ("a",)), EngineDraining("e0"))
    bench.submit("r0")
    if loaded_while_drained:
        assert bench.ready("e0", 1) == []
        assert dispatched(bench.emit(EngineUndrained("e0"))) == [("r0", "e0", 1)]
    else:
        assert bench.emit(EngineUndrained("e0")) == []
        assert states(bench) == {"e0": EngineState.LOADING}
        assert dispatched(bench.ready("e0", 1)) == [("r0", "e0", 1)]


def test_an_engine_that_died_while_it_was_drained_is_started_when_it_is_undrained() -> None:
    bench = Bench()
    bench.add("e0")
    bench.emit(EngineDraining("e0"))
    bench.die("e0", 1)
    assert bench.wait(5) == []
    assert bench.emit(EngineUndrained("e0")) == []
    assert bench.wait(0.25) == [StartEngine("e0", 2, ("a",))]


def test_requests_of_a_removed_engine_go_elsewhere() -> None:
    bench = Bench()
    bench.add("e0", "e1")
    bench.submit("r0")
    assert bench.emit(EngineRemoved("e0")) == [
        Withdraw("r0"),
        KillEngine("e0", 1, "it was removed"),
        Dispatch("r0", "e1", 1, 2),
    ]
    assert bench.die("e0", 1, "r0") == []
    assert bench.emit(EngineFound("e0", 1, ("a",))) == []
    assert list(states(bench)) == ["e1"]
    assert bench.emit(EngineAdded("e0", ("a",))) == [StartEngine("e0", 2, ("a",))]


@pytest.mark.parametrize("incarnation", [0, 1, 3])
def test_events_of_other_incarnations_are_ignored(incarnation: int) -> None:
    bench = Bench()
    bench.add("e0")
    bench.die("e0", 1)
    bench.wait(1)
    bench.ready("e0", 2)
    bench.submit("r0")
    assert bench.die("e0", incarnation, "r0") == []
    assert bench.ready("e0", incarnation) == []
    assert bench.emit(EngineHeartbeat("e0", incarnation, hung="a step stands still")) == []
    assert (
        bench.emit(EngineProcessUsage("e0", incarnation, 9.0, 0), EngineLoading("e0", incarnation, "")) == []
    )
    assert bench.manager.owner("r0") == "e0"


def test_events_of_unknown_engines_and_requests_are_ignored() -> None:
    bench = Bench()
    bench.add("e0")
    bench.submit("r0")
    assert bench.emit(EngineReady("x", 1, {}), EngineDraining("x"), EngineRemoved("x")) == []
    assert bench.end("x") == bench.progress("x") == bench.die("x", 1) == []
    assert bench.submit("r0") == bench.emit(EngineAdded("e0", ("a",))) == []
    assert bench.ready("e0", 1) == []
    assert bench.end("r0", None) == bench.end("r0") == []


def test_requests_wait_for_an_engine_of_their_service() -> None:
    bench = Bench()
    bench.add("e0", services=("a",))
    bench.add("e1", services=("b",))
    assert dispatched(bench.submit("r0", "b")) == [("r0", "e1", 1)]
    assert bench.die("e1", 1) == []
    assert bench.manager.services == {
        "a": ServiceStatus(ready=1, wanted=1, waiting=0, idle_since_ns=0),
        "b": ServiceStatus(ready=0, wanted=1, waiting=1, state=ServiceState.LOADING),
    }


def test_a_request_that_waits_for_room_does_not_block_later_ones() -> None:
    bench = Bench()
    bench.kv_tokens = {"a": 500}
    bench.add("small")
    bench.kv_tokens = {"a": 2000}
    bench.add("large")
    assert dispatched(bench.submit("long", prompt=800, most=600)) == [("long", "large", 1)]
    assert bench.die("large", 1) == []
    assert dispatched(bench.submit("short")) == [("short", "small", 1)]
    assert bench.submit("longest", prompt=1300, most=600) == []
    assert dispatched(bench.submit("shorter", most=50)) == [("shorter", "small", 1)]
    assert dispatched(bench.wait(1, ("small", 1))) == []
    assert dispatched(bench.ready("large", 2)) == [("long", "large", 2), ("longest", "large", 1)]


def test_a_request_that_no_engine_has_room_for_is_sent_to_one_that_says_so() -> None:
    bench = Bench()
    bench.kv_tokens = {"a": 500}
    bench.add("e0", "e1")
    assert dispatched(bench.submit("long", prompt=800, most=600)) == [("long", "e0", 1)]
    bench.kv_tokens = {"a": 2000}
    bench.add("large")
    assert dispatched(bench.submit("longer", prompt=800, most=700)) == [("longer", "large", 1)]
    assert dispatched(bench.emit(EngineRemoved("large"))) == [("longer", "e1", 2)]


def test_a_request_is_given_up_if_no_engine_with_room_for_it_is_back_in_time() -> None:
    bench = Bench(ClusterOptions(wait_for_engine_s=10, restart=RestartOptions(first_s=60, max_s=60)))
    bench.kv_tokens = {"a": 500}
    bench.add("small")
    bench.kv_tokens = {"a": 2000}
    bench.add("large")
    bench.submit("long", prompt=800, most=600)
    bench.die("large", 1)
    assert bench.wait(9.75, ("small", 1)) == []
    [refused] = bench.wait(0.25, ("small", 1))
    message = "no engine of service 'a' with KV memory for 1400 tokens was ready for 10 s"
    assert refused == Refuse("long", RefusalKind.NO_ENGINE, message)


def test_a_request_stays_on_an_engine_that_is_drained_if_no_other_has_room_for_it() -> None:
    bench = Bench()
    bench.kv_tokens = {"a": 500}
    bench.add("small")
    bench.kv_tokens = {"a": 2000}
    bench.add("large")
    bench.submit("short", prompt=100)
    bench.submit("long", prompt=800, most=600)
    bench.submit("other", prompt=100)
    bench.submit("second", prompt=100)
    assert dispatched(bench.emit(EngineDraining("large"))) == [("second", "small", 2)]
    assert {each.name: each.requests for each in bench.manager.engines} == {"small": 3, "large": 1}


def test_room_is_that_of_all_services_which_the_engine_has_now() -> None:
    bench = Bench()
    bench.kv_tokens = {"a": 2000, "b": 2000}
    bench.add("e0", services=("a", "b"))
    bench.kv_tokens = {"a": 1000, "b": 1000}
    bench.add("e1", services=("a", "b"))
    assert dispatched(bench.submit("r0", prompt=800, most=600)) == [("r0", "e0", 1)]
    bench.end("r0")
    bench.emit(ServicePlaced("c", ("e0",), None), ServiceWanted("c", loaded=True))
    bench.emit(ServiceLoaded("e0", 1, "c", SPEED, "", {"a": 700, "b": 700, "c": 500}))
    assert dispatched(bench.submit("r1", prompt=400, most=400)) == [("r1", "e1", 1)]
    bench.emit(ServiceWanted("c", loaded=False))
    bench.emit(ServiceUnloaded("e0", 1, "c", {"a": 2000, "b": 2000}))
    assert dispatched(bench.submit("r2", prompt=800, most=600)) == [("r2", "e0", 1)]
