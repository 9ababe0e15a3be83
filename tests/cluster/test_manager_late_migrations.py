"""What a manager does with time while requests move."""

from manager_builders import SPEED, Bench

from shoal.cluster.manager.actions import (
    Commit,
    Dispatch,
    Drop,
    Export,
    MigrationEnded,
    MigrationOutcome,
    Release,
    Reserve,
)
from shoal.cluster.manager.events import (
    EngineAdded,
    EngineReady,
    MigrationFailed,
    MigrationMethod,
    MigrationReserved,
    MigrationStopped,
    MigrationWanted,
)

BEATING = (("e0", 1), ("e1", 1))


def bench_committing() -> tuple[Bench, str]:
    """A request that e1 is to run from now on, and e0 keeps; the migration's id."""
    bench = Bench()
    for engine in ("e0", "e1"):
        bench.emit(EngineAdded(engine, ("a",)))
        bench.emit(EngineReady(engine, 1, {"a": SPEED}, {"a": "format"}))
    bench.submit("r")
    [reserve] = bench.emit(MigrationWanted("r", "e1", MigrationMethod.LIVE))
    assert isinstance(reserve, Reserve)
    [export] = bench.emit(MigrationReserved(reserve.migration))
    assert isinstance(export, Export)
    [commit] = bench.emit(MigrationStopped(reserve.migration))
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
    assert isinstance(ended, MigrationEnded)
    assert ended.outcome is MigrationOutcome.DONE


def test_a_request_whose_copy_is_given_up_goes_on_from_its_tokens() -> None:
    bench, migration = bench_committing()
    bench.wait(11, *BEATING)
    actions = bench.emit(MigrationFailed(migration, "it was dropped"))
    assert actions[-1] == Dispatch("r", actions[-1].engine, 1, 3)
    assert bench.manager.owner("r") is not None
