"""Searches for a running cluster: step times that it learned, its engines as they are, its last requests."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from live_search_builders import SPEED, make_task, replayed

from shoal.cluster.placing.search_process import SearchFailed, SearchProcess
from shoal.core import SLO, ConfigError
from shoal.engine.step_samples import StepSample
from shoal.forecast import StepRows
from shoal.schedule.weights_options import WeightsOptions
from shoal.simulate.live_search import LearnedTimes, model_of_sizes, search

ONE_EACH = {"0": "a", "1": "bc"}
"""Service ``a`` on one engine, ``b`` and ``c`` on the other."""


def steps_taking(seconds: float) -> list[StepSample]:
    """Steps of a service that take this long, and 1 ms per token more."""
    decodes = [StepSample(rows, 100 * rows, (), rows, seconds + rows * 1e-3) for rows in range(1, 33)]
    prompts = [StepSample(0, 0, ((tokens, 0),), 1, seconds + tokens * 1e-3) for tokens in range(10, 330, 10)]
    return decodes + prompts


@pytest.mark.slow
def test_a_service_with_more_traffic_than_its_engine_can_serve_gets_another():
    task = make_task({"a": 8.0, "b": 1.0, "c": 0.3}, {"0": "abc", "1": "c", "2": "c"})
    result = search(task)
    engines = {name for name, services in result.placement.items() if "a" in services}
    assert len(engines) > 1
    assert result.estimate.attainment > result.present.attainment + 0.2
    assert result.load_bytes > 0
    assert set().union(*result.placement.values()) == {"a", "b", "c"}


def test_a_service_without_requests_keeps_an_engine():
    result = search(make_task({"a": 4.0, "b": 4.0}, {"0": "abc", "1": "c"}))
    assert any("c" in services for services in result.placement.values())


def test_services_go_only_to_engines_that_may_have_them():
    task = make_task({"a": 8.0, "b": 0.3}, {"0": "ab", "1": "b"})
    only_b = replace(task.engines[1], kind="other", services=frozenset("b"))
    task = replace(
        task,
        engines=[task.engines[0], only_b],
        speeds=task.speeds | {("a", "other"): SPEED, ("b", "other"): SPEED},
    )
    assert search(task).placement["1"] <= {"b"}


def test_a_service_that_no_engine_may_have_is_an_error():
    task = make_task({"a": 1.0}, {"0": "a"})
    with pytest.raises(ConfigError, match="no running engine may have service 'a'"):
        search(replace(task, engines=[replace(task.engines[0], services=frozenset())]))


def test_step_times_are_those_of_steps_as_they_ran():
    task = make_task({"a": 1.0, "b": 1.0}, {"0": "ab"}, steps={("a", "cpu"): steps_taking(0.03)})
    times = LearnedTimes(task)
    row = StepRows(1, 100, (), 1)
    assert times("a", "cpu", 1).step_time(row) == pytest.approx(0.03, rel=0.1)
    assert times("b", "cpu", 1).step_time(row) == pytest.approx(SPEED.decode_s)
    assert times.learned == {("a", "cpu")}
    assert search(task).learned == {("a", "cpu")}


def test_slower_steps_leave_fewer_goals():
    fast = search(make_task({"a": 4.0}, {"0": "a"}))
    slow = search(make_task({"a": 4.0}, {"0": "a"}, steps={("a", "cpu"): steps_taking(0.2)}))
    assert slow.present.attainment < fast.present.attainment
    assert slow.execution_s["a"] > 5 * fast.execution_s["a"]


def test_a_search_ends_when_its_time_is_over_and_has_the_present_placement_at_least():
    seconds = itertools.count()
    task = make_task({"a": 8.0, "b": 2.0, "c": 1.0}, ONE_EACH, limit_s=3.0)
    result = search(task, clock=lambda: float(next(seconds)))
    assert result.ended_early
    assert result.placement == task.present
    assert result.load_bytes == 0


def test_weights_that_take_turns_cost_their_fetches():
    plenty = WeightsOptions(memory_bytes=4 * 10**8)
    tight = WeightsOptions(memory_bytes=10**8)
    rates = {"a": 1.0, "b": 1.0, "c": 1.0}
    found = [
        search(make_task(rates, {"0": "abc"}, weights=weights, fetch_bytes_per_s=1e8)).present
        for weights in (plenty, tight)
    ]
    assert found[1].normalised_latency > 1.5 * found[0].normalised_latency


@pytest.mark.parametrize(("weight_bytes", "kv_bytes"), [(10**9, 4096), (7, 64), (3 * 10**8, 98_304)])
def test_a_model_of_sizes_has_them(weight_bytes, kv_bytes):
    model = model_of_sizes("m", weight_bytes, kv_bytes)
    assert model.weight_bytes() == pytest.approx(weight_bytes, rel=1e-6, abs=1)
    assert model.kv_bytes_per_token() == kv_bytes


def test_a_process_of_its_own_finds_the_same():
    task = make_task({"a": 3.0, "b": 0.5}, {"0": "a", "1": "b"}, requests=replayed({"a": 3.0, "b": 0.5}))
    here = search(task)
    there = asyncio.run(SearchProcess()(task))
    assert (there.placement, there.estimate, there.present) == (here.placement, here.estimate, here.present)


def test_errors_of_the_process_are_told():
    task = make_task({"a": 1.0}, {"0": "a"})
    nowhere = replace(task, engines=[replace(task.engines[0], services=frozenset())])
    with pytest.raises(SearchFailed, match="no running engine may have service 'a'"):
        asyncio.run(SearchProcess()(nowhere))
    with pytest.raises(SearchFailed, match="its process ended"):
        asyncio.run(SearchProcess("shoal.there_is_no_such_module")(task))


def test_goals_of_requests_count():
    generous = make_task({"a": 6.0}, {"0": "a"}, requests=replayed({"a": 6.0}, slo=SLO(e2e_s=1000.0)))
    assert search(generous).present.attainment == 1.0
    strict = make_task({"a": 6.0}, {"0": "a"}, requests=replayed({"a": 6.0}, slo=SLO(e2e_s=0.01)))
    assert search(strict).present.attainment == 0.0
