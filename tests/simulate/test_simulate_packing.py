"""Packers as dispatch in simulation, with any scheduler: few engines, moves as KV grows, nothing lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_builders import PLAIN, make_request, make_spec, make_workload

from hypothesis_profiles import examples
from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.manager.events import ClusterEvent, EpochBegan
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import PackingOptions
from shoal.cluster.packing import PACKERS, MigrationBudgets
from shoal.config import load_scenario, prepare
from shoal.core import Request
from shoal.core.cluster import Link
from shoal.measure import RunRecord
from shoal.schedule import ADMISSIONS, ORDERS
from shoal.simulate import Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch

LINK = Link(bytes_per_s=1e7, latency_s=1e-4)
EPOCH = PackingOptions(epoch_s=0.05)
MOVE_OF_ONE_WHO_ENDS = """\
engines: 3
dispatch: load-balance
packing: {epoch: 100ms}
latency: {roofline: {device: h100}}
kv_cache: {memory: 1GiB}
services: [{name: a, model: llama-3.1-8b, context: 7000}]
workload:
  rate: 20
  requests: 60
  seed: 19
  lengths:
    prompt: {distribution: uniform, low: 500, high: 6500}
    output: {distribution: uniform, low: 50, high: 500}
"""


def run(
    engines: Sequence[EngineSpec],
    requests: list[Request],
    dispatch: str,
    *,
    packing: PackingOptions = EPOCH,
    link: Link | None = LINK,
    deaths: Sequence[tuple[float, int]] = (),
    drains: Sequence[tuple[float, int]] = (),
    skip_ahead: bool = True,
) -> RunRecord:
    """The record of a simulation at whose end nothing is left on any engine."""
    simulation = Simulation(
        engines,
        OpenLoop(requests),
        dispatch=dispatch_named(dispatch),
        watch=Watch(skip_ahead=skip_ahead, sample_s=0.05),
        deaths=Deaths(times=deaths, load_s=0.3),
        migrations=MigrationSpec(link=link, drains=drains, packing=packing),
    )
    record = simulation.run()
    for replica in simulation.replicas:
        assert replica.unfinished == len(replica.scheduler.leases) == 0
    assert sorted(row.request_id for row in record.requests) == sorted(request.id for request in requests)
    return record


def used_engines(record: RunRecord) -> set[int]:
    return {row.engine for row in record.requests}


def test_engines_stay_idle_while_others_have_room() -> None:
    requests = [make_request(number, 20, 20, at_s=number / 100) for number in range(30)]
    specs = [make_spec(400) for _ in range(4)]
    assert used_engines(run(specs, requests, "mell")) == {0}
    assert used_engines(run(specs, requests, "least-requests")) == {0, 1, 2, 3}


@pytest.mark.parametrize(("link", "method"), [(LINK, "live"), (None, "tokens")])
def test_a_request_that_outgrows_an_engine_migrates_before_it_is_full(link: Link | None, method: str) -> None:
    # 400 tokens hold all four at first; each ends with 150.
    requests = [make_request(number, 50, 100, at_s=number / 100) for number in range(4)]
    record = run([make_spec(100), make_spec(100)], requests, "mell", link=link)
    assert record.moves[method]["done"] >= 1
    assert used_engines(record) == {0, 1}
    assert sum(row.preemptions for row in record.requests) == 0
    # Without a second engine the scheduler has to preempt.
    alone = run([make_spec(100)], requests, "mell")
    assert alone.moves == {}


def test_a_budget_of_zero_allows_no_migration() -> None:
    requests = [make_request(number, 50, 100, at_s=number / 100) for number in range(4)]
    none = PackingOptions(epoch_s=0.05, budgets=MigrationBudgets(engine_bytes=0, prefill_tokens=0))
    assert run([make_spec(100), make_spec(100)], requests, "mell", packing=none).moves == {}


def test_a_request_that_outgrows_all_engines_is_withdrawn_and_counted() -> None:
    requests = [make_request(number, 50, 100, at_s=number / 100) for number in range(8)]
    record = run([make_spec(100), make_spec(100)], requests, "best-fit")
    assert record.withdrawn > 0
    assert sum(row.recomputed_tokens for row in record.requests) > 0
    assert run([make_spec(400)], requests, "best-fit").withdrawn == 0


def test_requests_wait_for_room_and_get_it_in_their_order() -> None:
    requests = [make_request(number, 150, 20, at_s=number / 1000) for number in range(6)]
    record = run([make_spec(50), make_spec(50)], requests, "best-fit")
    firsts = [row.first_token_ns for row in sorted(record.requests, key=lambda row: row.request_id)]
    assert firsts == sorted(firsts)
    assert sum(row.preemptions for row in record.requests) == 0


@given(
    seed=st.integers(0, 1000),
    packer=st.sampled_from(sorted(PACKERS)),
    order=st.sampled_from(sorted(ORDERS)),
    admission=st.sampled_from(sorted(ADMISSIONS)),
    depth=st.sampled_from([1, 2]),
    blocks=st.integers(40, 90),
    link=st.sampled_from([LINK, Link(bytes_per_s=1e5, latency_s=1e-3), None]),
    deaths=st.lists(st.tuples(st.floats(0, 2, width=16), st.integers(0, 2)), max_size=2),
    drains=st.lists(st.tuples(st.floats(0, 2, width=16), st.just(2)), max_size=1),
)
@settings(max_examples=examples(75))
def test_any_packer_goes_with_any_scheduler(
    seed: int,
    packer: str,
    order: str,
    admission: str,
    depth: int,
    blocks: int,
    link: Link | None,
    deaths: list[tuple[float, int]],
    drains: list[tuple[float, int]],
) -> None:
    options = replace(PLAIN, order=ORDERS[order](), admission=ADMISSIONS[admission](), depth=depth)
    specs = [make_spec(blocks, options=options, per_merged={"a": 1, "b": 2}) for _ in range(3)]
    requests = make_workload(24, rate=60, services=("a", "b"), seed=seed)
    on, off = (
        run(specs, requests, packer, link=link, deaths=deaths, drains=drains, skip_ahead=skip)
        for skip in (True, False)
    )
    assert on.requests == off.requests
    assert on.moves == off.moves
    expected = {request.id: request.true_output_tokens for request in requests}
    finished = {row.request_id: row.output_tokens for row in on.requests if row.answered}
    assert finished == expected


def test_the_output_of_migrating_requests_never_shrinks_for_the_packer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the source has stopped a request, and the manager has not heard of it."""
    handle = Manager.handle
    outputs: dict[str, list[int]] = {}

    def listen(self: Manager, event: ClusterEvent, now_ns: int) -> list[ClusterAction]:
        if isinstance(event, EpochBegan):
            for name, tokens in event.output_tokens.items():
                outputs.setdefault(name, []).append(tokens)
        return handle(self, event, now_ns)

    monkeypatch.setattr(Manager, "handle", listen)
    requests = [make_request(number, 50, 300, at_s=number / 100) for number in range(4)]
    late = Link(bytes_per_s=1e7, latency_s=0.1)
    record = run([make_spec(200), make_spec(200)], requests, "mell", link=late)
    assert record.moves["live"]["done"] >= 1
    assert all(tokens == sorted(tokens) for tokens in outputs.values())


@pytest.mark.parametrize("dispatch", ["max-min", "mell", "best-fit"])
def test_requests_of_engines_that_are_all_drained_are_refused_as_by_a_server(dispatch: str) -> None:
    requests = [make_request(number, 20, 20, at_s=number * 0.6) for number in range(3)]
    record = run([make_spec(100)], requests, dispatch, drains=[(0.5, 0)])
    rows = {row.request_id: row for row in record.requests}
    assert [rows[request.id].answered for request in requests] == [True, False, False]
    assert all("no engine" in (rows[request.id].error or "") for request in requests[1:])


def test_a_request_that_ends_before_its_migration_starts_is_ignored(tmp_path: Path) -> None:
    """What a packer decides after an event is carried out at the next, which here is the end of a request."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(MOVE_OF_ONE_WHO_ENDS)
    prepared = prepare(load_scenario(file=scenario))
    assert [row.answered for row in prepared.run().requests] == [True] * 60
