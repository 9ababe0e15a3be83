"""Requests of which engines die: who runs alone, where, and who is given up."""

from manager_builders import Bench, dispatched

from shoal.cluster.manager.actions import Dispatch, RefusalKind, Refuse, StartEngine, Withdraw
from shoal.cluster.manager.events import EngineAdded, EngineDraining
from shoal.cluster.options import ClusterOptions


def test_suspects_go_on_at_once_after_their_first_death() -> None:
    bench = Bench()
    bench.add("e0", "e1")
    bench.submit("r0")
    assert bench.die("e0", 1, "r0") == [Dispatch("r0", "e1", 1, 2)]


def test_after_a_second_death_a_request_runs_alone_until_it_makes_progress() -> None:
    bench = Bench()
    bench.add("e0", "e1", "e2")
    bench.submit("poison")
    bench.submit("r1")
    bench.submit("r2")
    assert bench.die("e0", 1, "poison") == [Dispatch("poison", "e1", 1, 2)]
    # The request waits for the engine that is being started again, the others do not.
    assert bench.die("e1", 1, "poison", "r1") == [Dispatch("r1", "e2", 1, 2)]
    assert bench.manager.waiting("a") == 1
    assert dispatched(bench.submit("r3")) == [("r3", "e2", 1)]
    assert bench.wait(1, ("e2", 1)) == [StartEngine("e0", 2, ("a",)), StartEngine("e1", 2, ("a",))]
    assert bench.ready("e1", 2) == [Dispatch("poison", "e1", 2, 3)]
    assert dispatched(bench.submit("r4")) == [("r4", "e2", 1)]
    assert bench.progress("poison") == []
    assert dispatched(bench.submit("r5")) == [("r5", "e1", 1)]


def test_two_deaths_alone_end_a_request_and_no_other() -> None:
    bench = Bench()
    bench.add("e0")
    bench.submit("poison")
    bench.submit("r1")
    bench.die("e0", 1, "poison", "r1")
    bench.wait(1)
    assert dispatched(bench.ready("e0", 2)) == [("poison", "e0", 2), ("r1", "e0", 2)]
    bench.progress("r1")
    bench.die("e0", 2, "poison", "r1")
    bench.wait(2)
    assert dispatched(bench.ready("e0", 3)) == [("poison", "e0", 3)]
    assert bench.die("e0", 3, "poison") == []
    bench.wait(4)
    assert dispatched(bench.ready("e0", 4)) == [("poison", "e0", 4)]
    [refused] = bench.die("e0", 4, "poison")
    assert isinstance(refused, Refuse)
    assert (refused.request, refused.kind) == ("poison", RefusalKind.POISON)
    bench.wait(8)
    assert dispatched(bench.ready("e0", 5)) == [("r1", "e0", 3)]


def test_progress_takes_deaths_back() -> None:
    bench = Bench(ClusterOptions(wait_for_engine_s=1000))
    bench.add("e0")
    bench.submit("r0")
    for incarnation in range(1, 10):
        bench.die("e0", incarnation, "r0")
        bench.wait(60)
        bench.submit(f"other{incarnation}")
        assert len(dispatched(bench.ready("e0", incarnation + 1))) == incarnation + 1
        bench.progress("r0")


def test_deaths_of_other_engines_do_not_make_suspects() -> None:
    bench = Bench(ClusterOptions(wait_for_engine_s=1000))
    bench.add("e0")
    bench.submit("r0")
    for incarnation in range(1, 10):
        bench.die("e0", incarnation, "somebody")
        bench.wait(60)
        assert dispatched(bench.ready("e0", incarnation + 1)) == [("r0", "e0", incarnation + 1)]


def test_those_in_quarantine_run_one_after_the_other_before_all_others() -> None:
    bench = Bench()
    bench.add("e0")
    for number in range(3):
        bench.submit(f"s{number}")
    suspects = [f"s{number}" for number in range(3)]
    bench.die("e0", 1, *suspects)
    bench.wait(1)
    bench.ready("e0", 2)
    bench.die("e0", 2, *suspects)
    bench.submit("r0")
    bench.wait(2)
    assert bench.ready("e0", 3) == [Dispatch("s0", "e0", 3, 3)]
    # Who turns out to be harmless makes room for the next, and does not keep it waiting.
    assert bench.progress("s0") == [Withdraw("s0"), Dispatch("s1", "e0", 3, 3)]
    assert bench.end("s1") == [Dispatch("s2", "e0", 3, 3)]
    assert bench.progress("s2") == [Dispatch("s0", "e0", 3, 4), Dispatch("r0", "e0", 3, 1)]


def test_an_engine_is_emptied_for_a_suspect_if_none_comes_back() -> None:
    bench = Bench()
    bench.add("e0", "e1", "e2")
    bench.submit("poison")
    for number in range(3):
        bench.submit(f"r{number}")
    bench.die("e0", 1, "poison")
    assert bench.manager.owner("poison") == "e1"
    # e1 has r0 and the suspect, which is not moved to an engine that may die of it; e2 has r1 and r2.
    assert dispatched(bench.emit(EngineDraining("e0"), EngineDraining("e1"))) == [("r0", "e2", 2)]
    bench.add("e3")
    bench.submit("long")
    assert bench.manager.owner("long") == "e3"
    assert dispatched(bench.die("e1", 1, "poison")) == []
    assert dispatched(bench.submit("r4")) == [("r4", "e2", 1)]
    assert bench.end("long") == [Dispatch("poison", "e3", 1, 3)]


def waiting_suspect() -> Bench:
    """A suspect waits for e1, which is to be started again; e0 has another request."""
    bench = Bench(ClusterOptions(wait_for_engine_s=30))
    bench.add("e0", "e1")
    bench.submit("poison")
    bench.die("e0", 1, "poison")
    bench.wait(1, ("e1", 1))
    bench.ready("e0", 2)
    bench.submit("r0")
    assert bench.manager.owner("r0") == "e0"
    bench.die("e1", 1, "poison")
    return bench


def test_a_suspect_does_not_wait_for_ever_for_an_engine_that_never_loads() -> None:
    bench = waiting_suspect()
    assert bench.wait(29, ("e0", 2)) == [StartEngine("e1", 2, ("a",))]
    assert dispatched(bench.submit("r1")) == [("r1", "e0", 1)]
    bench.wait(1, ("e0", 2))
    # The only other engine is emptied now, and others wait meanwhile.
    assert bench.submit("r2") == []
    bench.end("r0")
    assert bench.end("r1") == [Dispatch("poison", "e0", 2, 3)]
    assert bench.end("poison") == [Dispatch("r2", "e0", 2, 1)]


def test_a_suspect_that_is_cancelled_makes_room() -> None:
    bench = Bench()
    bench.add("e0")
    bench.submit("poison")
    bench.die("e0", 1, "poison")
    bench.wait(1)
    bench.ready("e0", 2)
    bench.die("e0", 2, "poison")
    bench.wait(2)
    bench.submit("r0")
    assert dispatched(bench.ready("e0", 3)) == [("poison", "e0", 3)]
    assert bench.end("poison", None) == [Dispatch("r0", "e0", 3, 1)]


def test_an_engine_that_was_to_be_emptied_opens_again_when_the_suspect_is_cancelled() -> None:
    bench = waiting_suspect()
    bench.wait(30, ("e0", 2))
    assert bench.submit("r1") == []
    assert bench.end("poison", None) == [Dispatch("r1", "e0", 2, 1)]
    assert dispatched(bench.submit("r2")) == [("r2", "e0", 1)]


def test_one_engine_stays_open_to_others() -> None:
    bench = Bench()
    bench.add("e0")
    for number in range(2):
        bench.submit(f"s{number}")
    bench.die("e0", 1, "s0", "s1")
    bench.wait(1)
    bench.ready("e0", 2)
    bench.die("e0", 2, "s0", "s1")
    bench.emit(EngineAdded("e1", ("a",)))
    bench.wait(2)
    assert dispatched(bench.ready("e0", 3)) == [("s0", "e0", 3)]
    assert bench.ready("e1", 1) == []
    assert dispatched(bench.submit("r0")) == [("r0", "e1", 1)]
    assert bench.progress("s0") == [
        Withdraw("s0"),
        Dispatch("s1", "e0", 3, 3),
        Dispatch("s0", "e1", 1, 4),
    ]


def test_no_suspect_waits_longer_for_an_engine_than_others() -> None:
    bench = Bench(ClusterOptions(wait_for_engine_s=5))
    bench.add("e0")
    bench.submit("poison")
    bench.die("e0", 1, "poison")
    bench.wait(1)
    bench.ready("e0", 2)
    bench.die("e0", 2, "poison")
    *_, refused = bench.wait(5)
    assert isinstance(refused, Refuse)
    assert (refused.request, refused.kind) == ("poison", RefusalKind.NO_ENGINE)
