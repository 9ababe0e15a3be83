"""The speed measurement: its results, and that it leaves no state."""

import time

import pytest
from engine_builders import FakeExecutor, expected_tokens, make_engine, make_request, run_all

from shoal.engine.speed import measure_speed
from shoal.execute.protocol import StepFailed


@pytest.mark.parametrize("depth", [1, 2])
def test_a_measurement_leaves_no_state(depth):
    engine, info = make_engine("fake?step_ms=2", "fake", blocks=200, scheduler={"depth": depth})
    usage, stats = engine.fake_pool.usage(), engine.stats()
    for name, service in info.services.items():
        measured = engine.measure_speed(service, name)
        assert measured.decode_s > 0.0005
        assert 0 < measured.prefill_s < measured.decode_s
    assert (engine.fake_pool.usage(), engine.stats()) == (usage, stats)
    assert engine.fake_executor.sequences == {}
    engine.fake_pool.check_integrity()
    request = make_request("r", 9)
    engine.submit(request)
    tokens = [token for event in run_all(engine)["r"] for token in event.tokens]
    assert tokens == expected_tokens(request, 8)


@pytest.mark.parametrize("blocks", range(1, 24))
def test_small_pools_are_measured(blocks):
    engine, info = make_engine(blocks=blocks)
    service = info.services["a"]
    measured = engine.measure_speed(service, "a")
    assert (measured != service) == (service.max_total_tokens > 1)
    assert engine.fake_pool.live_blocks("a") == 0


class _Failing(FakeExecutor):
    def _iterate(self, plan):
        if plan.seq_ids and plan.new_tokens == (1,):
            raise StepFailed("no")
        return super()._iterate(plan)


def test_a_service_whose_steps_fail_has_no_speed():
    engine, _ = make_engine()
    executor = _Failing(engine.fake_executor.layout)
    assert measure_speed(executor, engine.fake_pool, "a", 100, 300, compiles=False) is None
    assert executor.sequences == {}
    assert engine.fake_pool.live_blocks("a") == 0


def test_a_slow_service_is_measured_in_few_steps():
    engine, info = make_engine("fake?step_ms=60")
    engine.measure_speed(info.services["a"], "a")
    assert engine.fake_executor.steps <= 4  # two of them have no rows


def test_steps_that_compile_kernels_are_not_timed():
    engine, info = make_engine("fake?step_ms=2")
    executor, slow = engine.fake_executor, [0.3, 0.3]
    submit = executor.submit

    def compiling(plan, *arguments):
        if plan.seq_ids and slow:
            time.sleep(slow.pop())
        submit(plan, *arguments)

    executor.submit = compiling
    measured = engine.measure_speed(info.services["a"], "a", compiles=True)
    assert measured.decode_s < 0.1
