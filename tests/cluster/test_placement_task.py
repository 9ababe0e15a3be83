"""The task of a search, from what engines report."""

from dataclasses import replace

import pytest

from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.options import EnginePlan
from shoal.cluster.placing.task_builder import ClusterFacts, build_task
from shoal.cluster.placing.traffic import IntervalFacts, ReplayedRequest
from shoal.cluster.status import EngineState, EngineStatus
from shoal.core import SLO, Service
from shoal.engine import EngineOptions
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.stats import EngineStats, PoolStats, ServiceStats, StepTotals
from shoal.engine.step_samples import StepSample
from shoal.schedule.policies.residency import Place
from shoal.schedule.stats import WeightsStats
from shoal.schedule.weights_options import WeightsOptions

SERVICES = {
    "a": Service(name="a", model="m", slo=SLO(ttft_s=1.0)),
    "b": Service(name="b", model="n", execution_s=2.0),
}
STEP = StepSample(1, 10, (), 1, 0.01)
TRAFFIC = IntervalFacts(
    length_s=60.0,
    services={},
    requests=(ReplayedRequest("a", 0, 10, 20, 5), ReplayedRequest("unknown", 1, 10, 20, 5)),
    window_s=50.0,
)


def service_info(model: str, prefill_s: float = 0.001, decode_s: float = 0.01) -> ServiceInfo:
    return ServiceInfo(
        model=model,
        context_tokens=2048,
        max_total_tokens=1000,
        kv_tokens=1000,
        vocab_size=10,
        prefill_s=prefill_s,
        decode_s=decode_s,
        dtype="float32",
        weight_bytes=500,
    )


def engine(name: str, device: str = "cpu", services: str = "ab", **fields) -> EngineStatus:
    info = EngineInfo(
        services={each: service_info({"a": "m", "b": "n"}[each]) for each in services},
        device=device,
        threads=2,
        block_size=16,
        merged_blocks=4,
        kv_bytes=64_000,
        weight_bytes=1000,
    )
    status = EngineStatus(
        name=name, state=EngineState.READY, services=tuple(services), device=device, info=info
    )
    return replace(status, **fields)


def facts(*engines: EngineStatus, weights: WeightsOptions | None = None, **fields) -> ClusterFacts:
    options = EngineOptions(services=tuple(SERVICES.values()), weights=weights or WeightsOptions())
    known = ClusterFacts(
        engines=engines,
        plans={each.name: EnginePlan(name=each.name, options=options) for each in engines},
        services=SERVICES,
        declared={each.name: set("ab") for each in engines},
        traffic=TRAFFIC,
    )
    return replace(known, **fields)


def test_a_task_has_what_engines_report():
    steps = {"x": {"a": [STEP]}, "y": {"a": [STEP, STEP], "gone": [STEP]}}
    task = build_task(facts(engine("x", unplaced=("b",)), engine("y"), steps=steps), 7.0)
    assert task is not None
    [kind] = {each.kind for each in task.engines}
    assert [each.name for each in task.engines] == ["x", "y"]
    assert task.present == {"x": frozenset("a"), "y": frozenset("ab")}
    assert task.steps == {("a", kind): [STEP] * 3}
    assert task.speeds == {(name, kind): ServiceSpeed(0.001, 0.01) for name in "ab"}
    assert (task.services["a"].kv_token_bytes, task.services["a"].weight_bytes) == (64, 500)
    assert (task.services["a"].slo, task.services["b"].execution_s) == (SLO(ttft_s=1.0), 2.0)
    assert [each.service for each in task.requests] == ["a"]
    assert (task.window_s, task.limit_s) == (50.0, 7.0)


def test_only_engines_that_are_ready_take_part():
    down = engine("y", state=EngineState.WAITING)
    drained = engine("z", state=EngineState.DRAINING)
    assert build_task(facts(engine("x"), down, drained), 7.0) is None
    task = build_task(facts(engine("x"), engine("v"), down), 7.0)
    assert task is not None
    assert [each.name for each in task.engines] == ["x", "v"]


def test_a_service_whose_engine_is_down_can_be_placed_on_another():
    down = engine("z", services="b", state=EngineState.WAITING)
    task = build_task(facts(engine("x", services="a"), engine("y", services="a"), down), 7.0)
    assert task is not None
    assert set(task.services) == {"a", "b"}
    assert task.speeds["b", task.engines[0].kind] == ServiceSpeed(0.001, 0.01)
    assert task.present == {"x": frozenset("a"), "y": frozenset("a")}


def test_a_service_that_no_engine_had_or_may_have_is_left_out():
    a_only = [engine(name, services="a") for name in "xy"]
    task = build_task(facts(*a_only), 7.0)
    assert task is not None
    assert set(task.services) == {"a"}
    declared = {"x": {"a"}, "y": {"a"}}
    task = build_task(facts(engine("x"), engine("y"), declared=declared), 7.0)
    assert task is not None
    assert set(task.services) == {"a"}


@pytest.mark.parametrize(
    "other",
    [
        engine("y", device="cuda:0"),
        replace(engine("y"), info=replace(engine("y").info, threads=4)),
        replace(engine("y"), info=replace(engine("y").info, kv_bytes=1)),
        replace(engine("y"), info=replace(engine("y").info, kernels="simulated by a data sheet")),
    ],
)
def test_engines_that_differ_are_of_different_kinds(other):
    task = build_task(facts(engine("x"), other), 7.0)
    assert task is not None
    assert len({each.kind for each in task.engines}) == 2


def test_what_an_engine_may_have_makes_a_kind_too_and_numbers_of_devices_do_not():
    declared = {"x": {"a", "b"}, "y": {"a"}}
    task = build_task(facts(engine("x"), engine("y"), declared=declared), 7.0)
    assert task is not None
    assert {each.kind: each.services for each in task.engines} == {
        "cpu with 2 threads (0)": frozenset("ab"),
        "cpu with 2 threads (1)": frozenset("a"),
    }
    task = build_task(facts(engine("x", "cuda:0"), engine("y", "cuda:1")), 7.0)
    assert task is not None
    assert {each.kind for each in task.engines} == {"cuda with 2 threads (0)"}


def test_weights_with_a_limit_come_as_fast_as_they_came():
    weights = WeightsStats(
        name="m",
        place=Place.RESIDENT,
        num_bytes=500,
        pinned=False,
        fetches=4,
        evictions=1,
        fetching_s=2.0,
        waits=0,
        waiting_s=0.0,
        longest_wait_s=0.0,
    )
    pool = PoolStats(
        total_bytes=0,
        live_bytes=0,
        cached_bytes=0,
        padding_bytes=0,
        unfilled_bytes=0,
        external_bytes=0,
        merged_blocks=0,
        free_merged_blocks=0,
    )
    stats = EngineStats(services={"a": ServiceStats(weights=weights)}, pool=pool, steps=StepTotals())
    options = WeightsOptions(memory_bytes=600, bandwidth=7e9)
    measured = engine("x", weights_memory_bytes=600, stats=stats)
    task = build_task(facts(measured, engine("y", weights_memory_bytes=550), weights=options), 7.0)
    assert task is not None
    assert (task.weights.memory_bytes, task.fetch_bytes_per_s) == (550, 1000.0)
    task = build_task(facts(engine("x", weights_memory_bytes=600), engine("y"), weights=options), 7.0)
    assert task is not None
    assert (task.weights.memory_bytes, task.fetch_bytes_per_s) == (None, 7e9)
