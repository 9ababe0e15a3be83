"""Running requests move to engines that are new, or take requests again."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_builders import SPEED, Bench

from hypothesis_profiles import examples
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.actions import ClusterAction, Reserve
from shoal.cluster.manager.events import (
    EngineDraining,
    EngineUndrained,
    MigrationReserved,
    MigrationStopped,
    ServiceSpeed,
)
from shoal.cluster.manager.migrations import MAX_CONCURRENT_MIGRATIONS
from shoal.cluster.options import ClusterOptions


def bench_of(dispatch: str = "max-min", kv_format: str = "k", **options: object) -> Bench:
    found = Bench(ClusterOptions(dispatch=dispatch, **options), dispatch)  # type: ignore[arg-type]
    found.kv_format = kv_format
    return found


def reserves(actions: Sequence[ClusterAction]) -> list[Reserve]:
    return [each for each in actions if isinstance(each, Reserve)]


def live(bench: Bench, seconds: float) -> list[tuple[str, str]]:
    """Time passes in which migrations succeed at once; returns (request, destination) of each."""
    moved = []
    for _ in range(round(4 * seconds)):
        beats = [(each.name, each.incarnation) for each in bench.manager.engines]
        for each in reserves(bench.wait(0.25, *beats)):
            bench.emit(MigrationReserved(each.migration), MigrationStopped(each.migration))
            bench.progress(each.request)
            moved.append((each.request, each.engine))
    return moved


def loads(bench: Bench) -> dict[str, int]:
    return {engine.name: engine.requests for engine in bench.manager.engines}


def test_a_new_engine_gets_its_share_of_running_requests() -> None:
    bench = bench_of()
    bench.add("x")
    for number in range(10):
        bench.submit(str(number))
    bench.add("y")
    moved = live(bench, 5)
    assert loads(bench) == {"x": 5, "y": 5}
    # The last ones have most of their work before them.
    assert sorted(moved) == [(str(number), "y") for number in range(5, 10)]
    assert live(bench, 100) == []


def test_at_most_a_few_move_at_a_time() -> None:
    bench = bench_of()
    bench.add("x")
    for number in range(30):
        bench.submit(str(number))
    bench.add("y")
    assert len(reserves(bench.wait(1, ("x", 1), ("y", 1)))) == MAX_CONCURRENT_MIGRATIONS


@pytest.mark.parametrize("comes", ["restarts", "is undrained"])
def test_an_engine_that_comes_back_is_filled_too(comes: str) -> None:
    bench = bench_of()
    bench.add("x", "y")
    if comes == "restarts":
        bench.die("y", 1)
    else:
        bench.emit(EngineDraining("y"))
    for number in range(6):
        bench.submit(str(number))
    assert loads(bench) == {"x": 6, "y": 0}
    if comes == "restarts":
        bench.wait(2, ("x", 1))
        bench.ready("y", 2)
    else:
        bench.emit(EngineUndrained("y"))
    live(bench, 5)
    assert loads(bench) == {"x": 3, "y": 3}


def test_a_slow_engine_gets_fewer() -> None:
    bench = bench_of()
    bench.add("x")
    for number in range(9):
        bench.submit(str(number))
    bench.add("y", speed=ServiceSpeed(SPEED.prefill_s * 2, SPEED.decode_s * 2))
    live(bench, 5)
    assert loads(bench) == {"x": 6, "y": 3}


def test_what_cannot_be_sent_stays() -> None:
    """Recomputing a request costs more than it may gain."""
    bench = bench_of(kv_format="")
    bench.add("x")
    for number in range(6):
        bench.submit(str(number))
    bench.add("y")
    assert live(bench, 5) == []


def test_services_that_the_new_engine_lacks_stay() -> None:
    bench = bench_of()
    bench.add("x", services=("a", "b"))
    for number in range(4):
        bench.submit(f"a{number}")
        bench.submit(f"b{number}", "b")
    bench.add("y", services=("b",))
    assert {request[0] for request, _ in live(bench, 5)} == {"b"}


def test_batches_stay_together() -> None:
    bench = bench_of(batching=BatchingOptions())
    bench.add("x")
    for number in range(4):
        bench.submit(str(number))
    bench.add("y")
    assert live(bench, 5) == []


@settings(max_examples=examples(60))
@given(
    before=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    factor=st.floats(0.25, 4),
    after=st.lists(st.integers(1, 200), max_size=6),
)
def test_the_longest_work_never_grows(before: list[int], factor: float, after: list[int]) -> None:
    """No move makes the busiest engine busier, whatever requests come meanwhile."""
    bench = bench_of()
    bench.add("x")
    for number, tokens in enumerate(before):
        bench.submit(str(number), most=tokens)
    bench.add("y", speed=ServiceSpeed(SPEED.prefill_s * factor, SPEED.decode_s * factor))
    for number, tokens in enumerate(after):
        bench.submit(f"n{number}", most=tokens)

    def longest() -> int:
        return max(engine.load.remaining_ns for engine in bench.manager._engines.values())

    most = longest()
    for _ in range(40):
        moved = live(bench, 0.25)
        assert longest() <= most
        most = longest()
    assert not moved


def test_an_engine_is_filled_when_no_move_is_worthwhile() -> None:
    bench = bench_of()
    bench.add("x")
    bench.submit("one")
    bench.add("y")
    assert bench.manager.rebalances
    assert live(bench, 0.5) == []
    assert not bench.manager.rebalances
