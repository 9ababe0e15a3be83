"""Tokens within their deadlines: those of the times in the schedule log, wherever a request runs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulate_builders import make_request, make_spec, make_workload

from shoal.cluster.manager.dispatch import LeastRequests
from shoal.cluster.manager.events import MigrationMethod
from shoal.core import SLO, StepPlan, TokenDeadlines
from shoal.core.cluster import Link
from shoal.measure import RunRecord, summarise
from shoal.simulate import Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch

GOALS = SLO(ttft_s=0.15, tpot_s=0.012)


def with_goals(spec: EngineSpec, slo: SLO = GOALS, *names: str) -> EngineSpec:
    names = names or tuple(spec.services)
    changed = {name: replace(spec.services[name], slo=slo) for name in names}
    return replace(spec, services={**spec.services, **changed})


class TokenTimes:
    """Times of all tokens, from the plans of one engine."""

    def __init__(self) -> None:
        self.by_seed: dict[int, list[int]] = defaultdict(list)
        """By the seed of the request."""
        self._seeds: dict[int, int] = {}
        self._free_ns = 0

    def note(self, engine: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        self._seeds.update({new.seq_id: new.seed for new in plan.joined})
        end_ns = max(made_ns, self._free_ns)
        for step_ns in steps_ns:
            end_ns += step_ns
            for row in plan.sampled:
                self.by_seed[self._seeds[plan.seq_ids[row]]].append(end_ns)
        self._free_ns = end_ns


@pytest.mark.parametrize("skip_ahead", [False, True])
@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize(("mode", "blocks"), [("recompute", 40), ("swap", 40), ("recompute", 1000)])
def test_they_are_those_of_the_log(mode: str, blocks: int, steps: tuple[int, int], skip_ahead: bool) -> None:
    depth, iterations = steps
    spec = make_spec(
        blocks,
        per_merged={"a": 1, "b": 1},
        preemption_mode=mode,
        depth=depth,
        max_iterations=iterations,
        max_batched_tokens=64,
    )
    requests = make_workload(40, rate=40.0, services="ab", seed=2)
    times = TokenTimes()
    watch = Watch(skip_ahead=skip_ahead)
    simulation = Simulation([with_goals(spec)], OpenLoop(requests), watch=watch, on_plan=times.note)
    rows = {row.request_id: row for row in simulation.run().requests}
    counts = []
    for request in requests:
        deadlines = TokenDeadlines.of(GOALS, request.arrival_ns)
        assert deadlines is not None
        ends_ns = times.by_seed[request.seed]
        counts.append(sum(end_ns <= deadlines.due_ns(number) for number, end_ns in enumerate(ends_ns)))
        row = rows[request.id]
        assert (row.output_tokens, row.tokens_on_time) == (len(ends_ns), counts[-1])
    assert 0 < sum(counts) < sum(row.output_tokens for row in rows.values())


def test_only_requests_with_both_goals_have_deadlines() -> None:
    spec = with_goals(make_spec(per_merged={"a": 1, "b": 1}), SLO(ttft_s=1.0), "a")
    requests = [
        make_request(0, 10, 5),
        make_request(1, 10, 5, service="b"),
        replace(make_request(2, 10, 5), slo=SLO(tpot_s=1.0)),
        replace(make_request(3, 10, 5, service="b"), slo=SLO(ttft_s=1e-9, tpot_s=1e-9)),
    ]
    record = Simulation([spec], OpenLoop(requests)).run()
    counts = {row.request_id: row.tokens_on_time for row in record.requests}
    assert counts == {"r0": None, "r1": None, "r2": 5, "r3": 0}
    summary = summarise(record)
    assert (summary.overall.tokens_on_time, summary.services["b"].tokens_on_time) == (0.5, 0.0)


def moved(slo: SLO, method: MigrationMethod | None, *, skip_ahead: bool) -> RunRecord:
    """A request that migrates, or whose engine dies (None), after about half of its 100 tokens."""
    wanted = [] if method is None else [(0.5, "r0", 1, method)]
    return Simulation(
        [with_goals(make_spec(), slo)] * 2,
        OpenLoop([make_request(0, 50, 100)]),
        dispatch=LeastRequests(),
        migrations=MigrationSpec(link=Link(bytes_per_s=1e5, latency_s=1e-4), wanted=wanted),
        deaths=Deaths(times=[(0.5, 0)] if method is None else []),
        watch=Watch(skip_ahead=skip_ahead),
    ).run()


@pytest.mark.parametrize("skip_ahead", [False, True])
@pytest.mark.parametrize("method", [*MigrationMethod, None])
def test_tokens_of_all_engines_count(method: MigrationMethod | None, skip_ahead: bool) -> None:
    [row] = moved(SLO(ttft_s=1.0, tpot_s=1.0), method, skip_ahead=skip_ahead).requests
    assert (row.engine, row.output_tokens, row.tokens_on_time) == (1, 100, 100)
    # A token takes about 8.07 ms: they are on time until the request moves, and late from then on.
    [row] = moved(SLO(ttft_s=0.0105, tpot_s=0.0081), method, skip_ahead=skip_ahead).requests
    assert row.tokens_on_time is not None
    assert 40 < row.tokens_on_time < 100
