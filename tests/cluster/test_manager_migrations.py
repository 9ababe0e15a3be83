"""What a manager decides on requests that move."""

import pytest
from manager_builders import Bench, dispatched

from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Drop,
    Export,
    MigrationEnded,
    MigrationOutcome,
    Release,
    Reserve,
    Withdraw,
)
from shoal.cluster.manager.events import (
    EngineDraining,
    EngineRemoved,
    MigrationDeclined,
    MigrationFailed,
    MigrationMethod,
    MigrationReserved,
    MigrationStopped,
    MigrationWanted,
)


def bench_of(*engines: str, kv_format: str = "x") -> Bench:
    bench = Bench()
    bench.kv_format = kv_format
    bench.add(*engines)
    return bench


def moving(answers: int) -> Bench:
    """Request r0 moves from e0 to e1; that many answers have come."""
    bench = bench_of("e0", "e1")
    bench.submit("r0")
    bench.emit(MigrationWanted("r0", "e1", MigrationMethod.LIVE))
    bench.emit(*[MigrationReserved("r0m1"), MigrationStopped("r0m1")][:answers])
    return bench


def ends(actions: list[ClusterAction]) -> list[tuple[MigrationOutcome, str]]:
    return [(each.outcome, each.why) for each in actions if isinstance(each, MigrationEnded)]


def test_a_live_migration_step_by_step() -> None:
    bench = bench_of("e0", "e1")
    bench.submit("r0")
    assert bench.emit(MigrationWanted("r0", None, MigrationMethod.LIVE)) == [Reserve("r0m1", "r0", "e1")]
    assert [engine.leases for engine in bench.manager.engines] == [0, 1]
    assert bench.emit(MigrationReserved("r0m1")) == [Export("r0m1", "r0", "e0", "e1", live=True)]
    assert bench.manager.owner("r0") == "e0"
    assert bench.emit(MigrationStopped("r0m1")) == [Commit("r0m1", "r0", "e1", 2)]
    assert bench.manager.owner("r0") == "e1"
    assert [engine.leases for engine in bench.manager.engines] == [1, 0]
    release, ended = bench.progress("r0")
    assert release == Release("r0m1", "e0")
    assert ends([ended]) == [(MigrationOutcome.DONE, "")]
    assert [engine.leases for engine in bench.manager.engines] == [0, 0]
    assert bench.manager.engines[0].migrations == {(MigrationMethod.LIVE, MigrationOutcome.DONE): 1}


def test_the_destination_counts_what_comes_when_others_are_dispatched() -> None:
    bench = bench_of("e0", "e1")
    bench.submit("r0")
    bench.emit(MigrationWanted("r0", "e1", MigrationMethod.LIVE))
    assert dispatched(bench.submit("r1")) == [("r1", "e0", 1)]
    assert dispatched(bench.submit("r2")) == [("r2", "e1", 1)]


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_request_that_ends_is_forgotten_by_both(answers: int) -> None:
    bench = moving(answers)
    actions = bench.end("r0")
    assert Drop("r0m1", "r0", "e1") in actions
    assert (Release("r0m1", "e0") in actions) is (answers > 0)
    assert ends(actions) == [(MigrationOutcome.ENDED, "")]


def test_a_failed_destination_gives_the_request_back() -> None:
    bench = moving(2)
    actions = bench.emit(MigrationFailed("r0m1", "some of its KV did not come"))
    assert actions[0] == Abort("r0m1", "r0", "e0", 3)
    assert ends(actions) == [(MigrationOutcome.ABORTED, "some of its KV did not come")]
    assert bench.manager.owner("r0") == "e0"
    # Its KV is not tried again.
    assert bench.emit(MigrationWanted("r0", None, MigrationMethod.LIVE)) == [
        Withdraw("r0"),
        Dispatch("r0", "e1", 1, 4),
    ]


def test_without_source_and_destination_it_goes_on_from_its_tokens() -> None:
    bench = moving(2)
    assert bench.die("e0", 1) == [Drop("r0m1", "r0", "e1")]
    actions = bench.emit(MigrationFailed("r0m1", "dropped"))
    assert dispatched(actions) == [("r0", "e1", 3)]
    assert actions[0] == Withdraw("r0")


def test_a_destination_that_is_removed_gives_the_request_back() -> None:
    bench = moving(2)
    actions = bench.emit(EngineRemoved("e1"))
    assert Abort("r0m1", "r0", "e0", 3) in actions
    assert bench.manager.owner("r0") == "e0"


def test_nothing_is_committed_to_a_destination_that_is_drained_meanwhile() -> None:
    bench = moving(1)
    bench.emit(EngineDraining("e1"))
    actions = bench.emit(MigrationStopped("r0m1"))
    assert actions[:2] == [Drop("r0m1", "r0", "e1"), Abort("r0m1", "r0", "e0")]
    assert bench.manager.owner("r0") == "e0"


def test_a_migration_without_progress_is_aborted() -> None:
    bench = moving(1)
    assert bench.wait(9.75, ("e0", 1), ("e1", 1)) == []
    actions = bench.wait(0.25, ("e0", 1), ("e1", 1))
    assert actions[:2] == [Drop("r0m1", "r0", "e1"), Abort("r0m1", "r0", "e0")]
    assert ends(actions) == [(MigrationOutcome.ABORTED, "copying for 10 s")]


def test_kv_goes_to_an_engine_of_the_same_format_if_there_is_one() -> None:
    bench = bench_of("e0")
    bench.submit("r0")
    bench.kv_format = "y"
    bench.add("e1")
    bench.kv_format = "x"
    bench.add("e2")
    bench.submit("r1")
    bench.submit("r2")
    assert bench.emit(MigrationWanted("r0", None, MigrationMethod.STOP)) == [Reserve("r0m1", "r0", "e2")]
    [withdrawn, sent] = bench.emit(MigrationWanted("r1", "e0", MigrationMethod.STOP))
    assert (withdrawn, sent) == (Withdraw("r1"), Dispatch("r1", "e0", 1, 2))


def test_a_drain_migrates_four_requests_at_a_time_and_retries_after_a_second() -> None:
    bench = bench_of("e0")
    for number in range(6):
        bench.submit(f"r{number}")
    bench.add("e1")
    began = bench.emit(EngineDraining("e0"))
    assert began == [Reserve(f"r{number}m{number + 1}", f"r{number}", "e1") for number in range(4)]
    actions = bench.emit(MigrationDeclined("r0m1", "there is no room"))
    assert actions == [
        MigrationEnded(
            "r0m1", "r0", "e0", "e1", MigrationMethod.LIVE, 0.0, MigrationOutcome.ABORTED, "there is no room"
        )
    ]
    assert ends(bench.emit(MigrationDeclined("r3m4", "there is no room")))
    assert bench.wait(0.75, ("e0", 1), ("e1", 1)) == []
    again = [Reserve("r0m5", "r0", "e1"), Reserve("r3m6", "r3", "e1")]
    assert bench.wait(0.25, ("e0", 1), ("e1", 1)) == again
