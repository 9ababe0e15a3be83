"""Batches that the manager forms: when, of which requests, for which engine, and what breaks them up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_builders import SECOND, SPEED, Bench

from hypothesis_profiles import examples
from shoal.batches import FORMERS
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.actions import ClusterAction, Dispatch, Refuse, Withdraw
from shoal.cluster.manager.batch_formation import FORMED_AT_ONCE
from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.cluster.manager.engine_load import BatchTime
from shoal.cluster.manager.events import (
    EngineDraining,
    MigrationMethod,
    MigrationWanted,
    SliceEnded,
    Submitted,
)
from shoal.cluster.options import ClusterOptions
from shoal.cluster.packing import PACKERS
from shoal.core import ConfigError

IDLE = BatchingOptions(max_batch=2)
EVERY_SECOND = BatchingOptions(interval_s=1.0)


def make_bench(batching: BatchingOptions, dispatch: str = "round-robin", kv_tokens: int = 10_000) -> Bench:
    bench = Bench(ClusterOptions(batching=batching, dispatch=dispatch), dispatch)
    bench.kv_tokens = {"a": kv_tokens, "b": kv_tokens}
    return bench


def batches(actions: Sequence[ClusterAction]) -> list[tuple[str, list[str]]]:
    """(engine, its requests) of each batch, in the order of their numbers."""
    found: dict[int, tuple[str, list[str]]] = {}
    for each in actions:
        if isinstance(each, Dispatch):
            assert each.batch is not None
            engine, requests = found.setdefault(each.batch, (each.engine, []))
            assert engine == each.engine
            requests.append(each.request)
    assert list(found) == sorted(found)
    return list(found.values())


def test_an_idle_engine_gets_a_batch_at_once_and_the_next_when_it_is_idle_again():
    bench = make_bench(IDLE)
    bench.add("e0")
    assert batches(bench.submit("r0")) == [("e0", ["r0"])]
    assert [bench.submit(f"r{number}") for number in (1, 2, 3)] == [[], [], []]
    assert batches(bench.end("r0")) == [("e0", ["r1", "r2"])]
    assert bench.end("r1") == []
    assert batches(bench.end("r2")) == [("e0", ["r3"])]
    status = bench.manager.services["a"]
    assert (status.batches, status.batched_requests) == (3, 4)


def test_each_idle_engine_gets_one_batch():
    bench = make_bench(IDLE)
    for number in range(7):
        bench.submit(f"r{number}")
    bench.add("e0")
    actions = bench.add("e1")
    assert batches(actions) == [("e1", ["r2", "r3"])]
    assert batches(bench.end("r2")) == []
    assert batches(bench.end("r3")) == [("e1", ["r4", "r5"])]


def test_batches_are_formed_at_intervals_and_at_once_after_a_pause():
    bench = make_bench(EVERY_SECOND)
    bench.add("e0")
    assert batches(bench.submit("r0")) == [("e0", ["r0"])]
    assert bench.submit("r1") == []
    assert batches(bench.wait(0.75, ("e0", 1))) == []
    assert bench.submit("r2") == []
    assert batches(bench.wait(0.25, ("e0", 1))) == [("e0", ["r1", "r2"])]
    bench.wait(5, ("e0", 1))
    assert batches(bench.submit("r3")) == [("e0", ["r3"])]


def test_the_interval_grows_with_the_work_of_the_least_loaded_engine():
    bench = make_bench(replace(EVERY_SECOND, load_factor=0.5), "max-min")
    bench.add("e0", "e1")
    # A batch of one takes 10 x 1 ms + 99 x 10 ms, 1 s; 0.5 s are below the interval.
    bench.submit("r0", most=100)
    bench.submit("r1", most=1000)
    assert batches(bench.wait(1, ("e0", 1), ("e1", 1))) == [("e1", ["r1"])]
    # Now the least loaded has 1 s, r1's 10 s.
    bench.submit("r2", most=1000)
    bench.wait(1, ("e0", 1), ("e1", 1))
    # The least loaded has some 10 s of work: 5 s pass.
    bench.submit("r3")
    assert batches(bench.wait(4.75, ("e0", 1), ("e1", 1))) == []
    assert batches(bench.wait(0.5, ("e0", 1), ("e1", 1))) != []


def test_an_interval_that_grows_with_the_load_ends_with_the_load():
    bench = make_bench(replace(EVERY_SECOND, load_factor=0.5), "max-min")
    bench.add("e0")
    bench.submit("r0", most=8000)  # some 80 s
    bench.wait(1, ("e0", 1))
    bench.submit("r1")
    assert batches(bench.wait(2, ("e0", 1))) == []
    assert batches(bench.end("r0")) == [("e0", ["r1"])]


def test_the_longest_batch_goes_to_the_least_loaded_engine():
    bench = make_bench(replace(EVERY_SECOND, max_batch=1, longest_first=True), "max-min")
    bench.add("e0", "e1")
    bench.submit("first", most=1)
    for number, most in enumerate((100, 400, 300, 200)):
        bench.submit(f"r{number}", most=most)
    found = batches(bench.wait(1, ("e0", 1), ("e1", 1)))
    # Longest processing time first: 400 + 100 and 300 + 200.
    assert [requests for _, requests in found] == [["r1"], ["r2"], ["r3"], ["r0"]]
    assert found[0][0] == found[3][0] != found[1][0] == found[2][0]


@pytest.mark.parametrize("engines", [2, 3, 4])
def test_batches_take_turns_whatever_their_size(engines: int):
    bench = make_bench(replace(EVERY_SECOND, max_batch=4))
    names = [f"e{number}" for number in range(engines)]
    bench.add(*names)
    bench.submit("first")
    for number in range(4 * 2 * engines):
        bench.submit(f"r{number}")
    found = batches(bench.wait(1, *[(name, 1) for name in names]))
    assert [len(requests) for _, requests in found] == [4] * 2 * engines
    assert Counter(engine for engine, _ in found) == dict.fromkeys(names, 2)


def test_an_engine_is_idle_for_a_service_that_has_nothing_there():
    bench = make_bench(BatchingOptions(max_batch=1))
    bench.add("e0", services=("a", "b"))
    assert batches(bench.submit("a0")) == [("e0", ["a0"])]
    assert bench.submit("a1") == []
    assert batches(bench.submit("b0", "b")) == [("e0", ["b0"])]
    assert batches(bench.end("b0")) == []


def test_a_large_pool_is_divided_in_parts():
    bench = make_bench(EVERY_SECOND, kv_tokens=1_000_000)
    bench.add("e0")
    bench.submit("first")
    for number in range(FORMED_AT_ONCE + 5):
        bench.submit(f"r{number}")
    found = batches(bench.wait(1, ("e0", 1)))
    assert [len(requests) for _, requests in found] == [FORMED_AT_ONCE, 5]


def test_the_load_of_an_engine_falls_by_the_estimates_of_its_batches():
    bench = make_bench(BatchingOptions(), "max-min")
    bench.add("e0")
    for number in range(3):
        bench.submit(f"w{number}")
    bench.end("w0")  # w1 and w2 are a batch
    [engine] = [each.load for each in bench.manager._engines.values()]
    assert engine.remaining_ns == 2 * (int(BatchTime(SPEED).serve(2, 10, 100) * 1e9) // 2)
    bench.end("w1")
    bench.end("w2")
    assert engine.remaining_ns == 0


def test_batches_fit_in_their_share_of_the_smallest_engine():
    bench = make_bench(replace(EVERY_SECOND, memory_share=0.5), kv_tokens=1000)
    bench.add("e0")
    bench.submit("first")
    for number in range(8):  # 500 tokens hold four of 110
        bench.submit(f"r{number}")
    found = batches(bench.wait(1, ("e0", 1)))
    assert [len(requests) for _, requests in found] == [4, 4]


def test_a_call_with_several_choices_is_a_batch_of_its_own():
    bench = make_bench(EVERY_SECOND)
    bench.add("e0")
    bench.submit("first")
    bench.submit("r0")
    bench.submit("four", choices=4)
    bench.submit("r1")
    found = batches(bench.wait(1, ("e0", 1)))
    assert sorted(requests for _, requests in found) == [["four"], ["r0", "r1"]]


def test_services_have_batches_and_intervals_of_their_own():
    bench = make_bench(EVERY_SECOND)
    bench.add("e0", services=("a", "b"))
    bench.submit("a0")
    bench.wait(0.5, ("e0", 1))
    assert batches(bench.submit("b0", "b")) == [("e0", ["b0"])]
    bench.submit("a1")
    bench.submit("b1", "b")
    assert batches(bench.wait(0.5, ("e0", 1))) == [("e0", ["a1"])]
    assert batches(bench.wait(0.5, ("e0", 1))) == [("e0", ["b1"])]


def test_goals_and_predictions_reach_the_former():
    bench = make_bench(BatchingOptions(former="slo-dbs", max_batch=2, interval_s=1.0))
    bench.add("e0")
    bench.submit("first")
    for request, goal_s in (("slow", 300.0), ("quick", 1.0), ("hasty", 1.0), ("lazy", 300.0)):
        bench.emit(Submitted(request, "a", 10, 100, predicted_tokens=20, goal_s=goal_s))
    first, *others = [requests for _, requests in batches(bench.wait(1, ("e0", 1)))]
    assert first == ["quick", "hasty"]
    assert sorted(request for requests in others for request in requests) == ["lazy", "slow"]


def test_a_batch_by_predictions_ends_with_the_longest_of_them():
    bench = make_bench(BatchingOptions(trust_predictions=True))
    bench.add("e0")
    [first] = bench.emit(Submitted("r0", "a", 10, 100, predicted_tokens=20))
    assert (first.batch, first.slice_tokens) == (1, 20)
    [again] = bench.emit(SliceEnded("r0", 20))
    # It has outgrown its prediction of 20, and is believed to take twice as many more.
    assert (again.batch, again.slice_tokens, again.attempt) == (2, 40, 2)


def test_without_slices_and_predictions_nothing_is_limited():
    bench = make_bench(IDLE)
    bench.add("e0")
    [dispatch] = bench.submit("r0")
    assert dispatch.slice_tokens is None


def test_a_request_goes_on_in_another_batch_behind_those_that_wait():
    bench = make_bench(BatchingOptions(slice_tokens=10, max_batch=1))
    bench.add("e0")
    [dispatch] = bench.submit("r0")
    assert dispatch.slice_tokens == 10
    bench.now_ns += SECOND
    bench.submit("r1")
    bench.now_ns += SECOND
    assert batches(bench.emit(SliceEnded("r0", 10))) == [("e0", ["r1"])]
    bench.now_ns += SECOND
    assert batches(bench.emit(SliceEnded("r1", 10))) == [("e0", ["r0"])]


def test_choices_that_are_apart_go_on_together():
    bench = make_bench(BatchingOptions(slice_tokens=10))
    bench.add("e0")
    [first] = bench.submit("r", choices=3, most=100)
    [again] = bench.emit(SliceEnded("r", 10))
    assert (first.slice_tokens, again.slice_tokens) == (10, 10)
    # After a death the one that was ahead has 30 tokens, the others 20; it ends.
    [again] = bench.emit(SliceEnded("r", 20))
    [again] = bench.emit(SliceEnded("r", 95))
    assert again.slice_tokens == 5


def test_events_of_slices_that_are_over_are_ignored():
    bench = make_bench(BatchingOptions(slice_tokens=10))
    bench.add("e0")
    assert bench.emit(SliceEnded("unknown", 10)) == []
    bench.submit("r0")
    bench.submit("r1")
    bench.emit(EngineDraining("e0"))
    bench.emit(SliceEnded("r0", 10))
    assert bench.emit(SliceEnded("r0", 10)) == []
    assert bench.manager.waiting("a") == 2


def test_requests_of_a_dead_engine_are_in_new_batches():
    bench = make_bench(EVERY_SECOND)
    bench.add("e0", "e1")
    bench.submit("first")
    for number in range(4):
        bench.submit(f"r{number}")
    [(engine, requests)] = batches(bench.wait(1, ("e0", 1), ("e1", 1)))
    assert len(requests) == 4
    other = "e1" if engine == "e0" else "e0"
    actions = bench.die(engine, 1) + bench.wait(1, (other, 1))
    found = batches(actions)
    assert {name for name, _ in found} == {other}
    assert set(requests) <= {request for _, several in found for request in several}


def test_a_suspect_runs_alone_in_a_batch_of_its_own():
    bench = make_bench(IDLE)
    bench.add("e0", "e1")
    bench.submit("poison")
    actions = bench.die("e0", 1, "poison") + bench.die("e1", 1, "poison")
    actions += bench.wait(3)
    actions += bench.ready("e0", 2) + bench.ready("e1", 2)
    assert [requests for _, requests in batches(actions)][-1] == ["poison"]


def test_a_migrating_request_keeps_its_batch_and_its_slice():
    bench = make_bench(BatchingOptions(slice_tokens=10))
    bench.add("e0", "e1")
    [dispatch] = bench.submit("r0")
    target = "e1" if dispatch.engine == "e0" else "e0"
    actions = bench.emit(MigrationWanted("r0", target, MigrationMethod.TOKENS))
    assert [type(each) for each in actions] == [Withdraw, Dispatch]
    assert actions[1].engine == target
    loads = {name: each.load.remaining_ns for name, each in bench.manager._engines.items()}
    assert loads[target] == int(BatchTime(SPEED).serve(1, 10, 10) * 1e9)
    assert loads[dispatch.engine] == 0
    assert (actions[1].batch, actions[1].slice_tokens) == (dispatch.batch, None)


def test_a_long_wait_for_a_batch_is_no_wait_for_an_engine():
    bench = make_bench(BatchingOptions(max_batch=1))
    bench.add("e0")
    bench.submit("r0")
    bench.submit("r1")
    bench.wait(100, ("e0", 1))
    actions = bench.die("e0", 1) + bench.wait(59)
    assert not [each for each in actions if isinstance(each, Refuse)]
    refused = [each.request for each in bench.wait(2) if isinstance(each, Refuse)]
    assert sorted(refused) == ["r0", "r1"]


def test_a_cancelled_request_is_in_no_batch():
    bench = make_bench(EVERY_SECOND)
    bench.add("e0")
    bench.submit("first")
    bench.submit("r0")
    bench.submit("r1")
    bench.end("r0", None)
    assert batches(bench.wait(1, ("e0", 1))) == [("e0", ["r1"])]


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_packers_place_single_requests(packer: str):
    with pytest.raises(ConfigError, match=f"{packer} packs single requests"):
        ClusterOptions(batching=IDLE, dispatch=packer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"former": "magic"}, "batch former 'magic' is not known"),
        ({"lengths": "magic"}, "batching lengths 'magic' is not known"),
        ({"interval_s": 0.0}, r"batching.interval must be above 0, or when-idle"),
        ({"interval_s": 1.0, "load_factor": 1.0}, r"load_factor must be in \[0, 1\)"),
        ({"load_factor": 0.5}, r"load_factor \(0.5\) lengthens an interval"),
        ({"slice_tokens": 0}, "slice_tokens must be at least 1"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"memory_share": 0.0}, r"memory_share must be in \(0, 1\]"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        BatchingOptions(**options)  # type: ignore[arg-type]


def test_ticks_are_fine_enough_for_the_interval():
    assert ClusterOptions(batching=BatchingOptions(interval_s=0.2)).tick_s == pytest.approx(0.025)
    assert ClusterOptions(batching=BatchingOptions(interval_s=60)).tick_s == 0.25
    assert ClusterOptions(batching=IDLE).tick_s == 0.25


@settings(max_examples=examples(60), deadline=None)
@given(
    former=st.sampled_from(sorted(FORMERS)),
    dispatch=st.sampled_from(sorted(DISPATCHES)),
    interval_s=st.sampled_from([None, 0.5, 3.0]),
    slice_tokens=st.sampled_from([None, 16]),
    max_batch=st.sampled_from([None, 3]),
    trust=st.booleans(),
    longest_first=st.booleans(),
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([None, 1.0, 50.0])), max_size=25
    ),
    data=st.data(),
)
def test_every_request_is_dispatched_once_in_a_batch_that_fits(
    former: str,
    dispatch: str,
    interval_s: float | None,
    slice_tokens: int | None,
    max_batch: int | None,
    trust: bool,
    longest_first: bool,
    requests: list[tuple[int, int, float | None]],
    data: st.DataObject,
):
    options = BatchingOptions(
        former=former,
        interval_s=interval_s,
        slice_tokens=slice_tokens,
        max_batch=max_batch,
        trust_predictions=trust,
        longest_first=longest_first,
    )
    bench = make_bench(options, dispatch, kv_tokens=200)
    bench.add("e0", "e1")
    alive = (("e0", 1), ("e1", 1))
    rows = {f"r{number}": request for number, request in enumerate(requests)}
    done = dict.fromkeys(rows, 0)
    running: dict[str, Dispatch] = {}
    actions: list[ClusterAction] = []
    for name, (prompt, most, goal_s) in rows.items():
        actions += bench.emit(Submitted(name, "a", prompt, most, predicted_tokens=most // 2, goal_s=goal_s))
        if data.draw(st.booleans()):
            actions += bench.wait(1, *alive)
    unfinished = set(rows)
    for _ in range(1000):
        found: dict[int, list[Dispatch]] = {}
        for each in actions:
            assert isinstance(each, Dispatch)
            assert each.request not in running
            running[each.request] = each
            found.setdefault(each.batch or 0, []).append(each)
        for members in found.values():
            assert max_batch is None or len(members) <= max_batch
            assert len({member.engine for member in members}) == 1
            if len(members) > 1:
                tokens = max(rows[member.request][0] + done[member.request] for member in members)
                limits = [
                    member.slice_tokens or rows[member.request][1] - done[member.request]
                    for member in members
                ]
                assert len(members) * (tokens + max(limits)) <= 0.9 * 200
        if not unfinished:
            break
        if not running:
            actions = bench.wait(0.5, *alive)
            continue
        name = data.draw(st.sampled_from(sorted(running)))
        dispatched, most = running.pop(name), rows[name][1]
        left = most - done[name]
        if dispatched.slice_tokens is not None and dispatched.slice_tokens < left:
            done[name] += dispatched.slice_tokens
            actions = bench.emit(SliceEnded(name, done[name]))
        else:
            unfinished.discard(name)
            actions = bench.end(name, most)
    assert not unfinished
    assert bench.now_ns < 10_000 * SECOND
