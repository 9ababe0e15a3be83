"""What a manager does with time while requests move."""

from manager_builders import SPEED, Bench

from shoal.cluster.manager.actions import (
    Commit,
    Dispatch,
    Drop,
    Export,
    MoveEnded,
    MoveOutcome,
    Release,
    Reserve,
)
from shoal.cluster.manager.events import (
    EngineAdded,
    EngineReady,
    MoveFailed,
    MoveMethod,
    MoveReserved,
    MoveStopped,
    MoveWanted,
)

BEATING = (("e0", 1), ("e1", 1))


def bench_committing() -> tuple[Bench, str]:
    """A request that e1 is to run from now on, and e0 keeps; the migration's id."""
    bench = Bench()
    for engine in ("e0", "e1"):
        bench.tell(EngineAdded(engine, ("a",)))
        bench.tell(EngineReady(engine, 1, {"a": SPEED}, {"a": "format"}))
    bench.submit("r")
    [reserve] = bench.tell(MoveWanted("r", "e1", MoveMethod.LIVE))
    assert isinstance(reserve, Reserve)
    [export] = bench.tell(MoveReserved(reserve.migration))
    assert isinstance(export, Export)
    [commit] = bench.tell(MoveStopped(reserve.migration))
    assert isinstance(commit, Commit)
    return bench, reserve.migration


def leases(bench: Bench) -> list[int]:
    return [engine.leases for engine in bench.manager.engines]


def test_a_copy_is_not_kept_for_ever_where_the_request_waits() -> None:
    """The destination is asked twice, and does not say that it has nothing."""
    bench, migration = bench_committing()
    drop, release = Drop(migration, "r", "e1"), Release(migration, "e0")
    assert bench.wait(4.5, *BEATING) == []
    assert bench.wait(1, *BEATING) == [drop]
    assert leases(bench) == [1, 0]
    assert bench.wait(5, *BEATING) == [release, drop]
    assert leases(bench) == [0, 0]
    assert bench.wait(5, *BEATING) == [drop]
    [ended] = bench.progress("r")
    assert isinstance(ended, MoveEnded)
    assert ended.outcome is MoveOutcome.DONE


def test_a_request_whose_copy_is_given_up_goes_on_from_its_tokens() -> None:
    bench, migration = bench_committing()
    bench.wait(11, *BEATING)
    actions = bench.tell(MoveFailed(migration, "it was dropped"))
    assert actions[-1] == Dispatch("r", actions[-1].engine, 1, 3)
    assert bench.manager.owner("r") is not None
