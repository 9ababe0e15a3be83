"""Data-parallel ranks: their steps begin and end together, and requests go to the least loaded."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulate_builders import TIMES, make_request, make_spec, make_workload

from crossed import each_nth
from shoal.cluster.manager.dispatch import RoundRobin
from shoal.core import ConfigError, Request, StepPlan
from shoal.forecast import StepRows
from shoal.forecast.latency import FloatArray
from shoal.measure import RunRecord
from shoal.schedule import Admission, Aggressive, Oracle
from shoal.simulate import Deaths, EngineSpec, OpenLoop, Simulation, Watch

Step = tuple[int, int, tuple[int, ...]]
"""When it began, how long it took, the tokens of its rows."""


class GroupTimes:
    """A step costs what the ranks' rows cost together; notes how many ranks took part."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def step_time(self, rows: StepRows) -> float:
        self.ranks.append(1 + len(rows.others))
        return sum(TIMES.step_time(one) for one in (rows, *rows.others))

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        raise AssertionError("ranks do not skip ahead")


def simulate(
    requests: Sequence[Request], ranks: int = 2, **knobs: object
) -> tuple[RunRecord, dict[int, list[Step]], GroupTimes]:
    times = GroupTimes()
    steps: dict[int, list[Step]] = defaultdict(list)

    def note(engine: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        steps[engine].append((made_ns, steps_ns[0], plan.new_tokens))

    specs = [make_spec(times=times, **knobs)] * ranks  # type: ignore[arg-type]
    simulation = Simulation(specs, OpenLoop(requests), watch=Watch(spans=True), on_plan=note, lock_step=True)
    times.ranks.clear()  # the fleet has asked how fast a request is alone
    return simulation.run(), steps, times


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("admission", "mode"), [(Aggressive(), "recompute"), (Oracle(), "swap")])
@pytest.mark.parametrize("seed", each_nth(range(5), 5))
def test_a_group_of_one_rank_is_an_engine(depth: int, admission: Admission, mode: str, seed: int) -> None:
    requests = make_workload(60, rate=40.0, seed=seed)
    spec = make_spec(60, depth=depth, admission=admission, preemption_mode=mode, max_batched_tokens=64)
    alone, grouped = (
        Simulation(
            [spec], OpenLoop(requests), watch=Watch(skip_ahead=False, spans=True), lock_step=lock_step
        ).run()
        for lock_step in (False, True)
    )
    assert grouped.requests == alone.requests
    assert grouped.spans == alone.spans
    # Memory in use is noted when a plan starts; an engine of depth 2 notes it when it is made.
    assert grouped == alone or depth == 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("blocks", [400, 60])
def test_all_ranks_step_together(depth: int, ranks: int, blocks: int) -> None:
    requests = make_workload(80, rate=30.0, seed=7)
    record, steps, _ = simulate(requests, ranks, blocks=blocks, max_batched_tokens=64, depth=depth)
    assert sorted(row.request_id for row in record.requests) == sorted(one.id for one in requests)
    assert all(row.answered for row in record.requests)
    begun: dict[int, int] = {}
    for start_ns, took_ns, _ in (step for of_rank in steps.values() for step in of_rank):
        assert begun.setdefault(start_ns, took_ns) == took_ns
    times = sorted(begun)
    assert all(at + begun[at] <= after for at, after in itertools.pairwise(times))
    assert len(steps) == ranks


def test_a_step_costs_what_all_ranks_compute() -> None:
    requests = [make_request(number, prompt=20, output=30) for number in range(4)]
    record, steps, times = simulate(requests)
    assert {row.engine for row in record.requests} == {0, 1}
    assert [tokens for _, _, tokens in steps[0]] == [tokens for _, _, tokens in steps[1]]
    assert set(times.ranks) == {2}
    alone = TIMES.step_time(StepRows(0, 0, ((20, 0), (20, 0)), 2))
    assert steps[0][0][1] == round(2 * alone * 1e9)


def test_a_rank_without_requests_takes_no_part() -> None:
    _, steps, times = simulate([make_request(0, output=9)])
    assert list(steps) == [0]
    assert set(times.ranks) == {1}


def test_a_request_that_arrives_during_a_step_waits_for_its_end_on_an_idle_rank_too() -> None:
    requests = [make_request(0, prompt=60, output=5), make_request(1, prompt=10, output=5, at_s=0.001)]
    record, steps, _ = simulate(requests)
    first, second = (steps[rank][0] for rank in (0, 1))
    assert first[0] == 0
    assert second[0] == first[0] + first[1]
    assert {row.request_id: row.engine for row in record.requests} == {"r0": 0, "r1": 1}


def test_requests_go_to_the_least_of_four_times_waiting_plus_running() -> None:
    """Rank 0 runs two long ones, rank 1 one; counts are renewed every 100 ms, and raised meanwhile."""
    long = [make_request(number, prompt=8, output=60) for number in range(3)]
    later = [make_request(3 + number, prompt=8, output=2, at_s=0.15) for number in range(4)]
    record, _, _ = simulate([*long, *later])
    engines = {row.request_id: row.engine for row in record.requests}
    assert [engines[f"r{number}"] for number in range(3)] == [0, 1, 0]
    # At 0.15 s: (2 running), (1 running), then every one that is dealt counts as 4.
    assert [engines[f"r{number}"] for number in range(3, 7)] == [1, 0, 1, 0]


def test_the_same_input_gives_the_same_record() -> None:
    requests = make_workload(40, seed=2)
    assert simulate(requests)[0] == simulate(requests)[0]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"max_iterations": 4}, "need plans of one iteration"),
        ({"per_merged": {"a": 1, "b": 1}}, "need one service"),
    ],
)
def test_what_a_group_cannot_have_is_refused(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        simulate([], **more)


def test_ranks_are_dealt_to_and_live() -> None:
    specs: list[EngineSpec] = [make_spec()] * 2
    with pytest.raises(ConfigError, match="need a dispatch of their own"):
        Simulation(specs, OpenLoop([]), dispatch=RoundRobin(), lock_step=True)
    with pytest.raises(ConfigError, match="need to live"):
        Simulation(specs, OpenLoop([]), deaths=replace(Deaths(), load_s=1.0), lock_step=True)
