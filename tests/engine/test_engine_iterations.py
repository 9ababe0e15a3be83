"""Plans of several iterations produce the same output as single steps."""

import random

import pytest
from engine_builders import EOS, expected_tokens, make_engine, make_request, run_all

from shoal.core import NO_TOKEN, ConfigError, FinishReason, StepPlan, StepResult
from shoal.schedule import SchedulerOptions
from shoal.schedule.step_tracker import InFlightStep, PlannedRows

PROMPT = [97, 98, 99, 100, 101]


def tokens_of(events: list) -> list[int]:
    return [token for event in events for token in event.tokens]


def watch_plans(engine) -> list[StepPlan]:
    """The list of all further plans of the engine."""
    plans: list[StepPlan] = []
    submit = engine.fake_executor.submit

    def noted(plan, interrupted):
        plans.append(plan)
        submit(plan, interrupted)

    engine.fake_executor.submit = noted
    return plans


def test_invalid_numbers_of_iterations_are_rejected():
    with pytest.raises(ConfigError, match="max_iterations must be at least 1"):
        SchedulerOptions(max_iterations=0)
    with pytest.raises(ConfigError, match=r"max_iterations 4 needs depth 1.*set depth to 1"):
        SchedulerOptions(max_iterations=4, depth=2)


@pytest.mark.parametrize("blocks", [16, 200])
@pytest.mark.parametrize("services", [1, 2])
def test_outputs_are_those_of_single_steps(blocks, services):
    engine, info = make_engine(
        *["fake?eos_every=30"] * services,
        blocks=blocks,
        scheduler={"max_iterations": 4, "max_batched_tokens": 16},
    )
    plans = watch_plans(engine)
    limit = min(info.services["a"].max_total_tokens - 20, 24)
    requests = [
        make_request(
            f"r{i}",
            prompt=1 + 3 * i % 20,
            service="ab"[i % services],
            temperature=i % 2,
            seed=i,
            max_tokens=limit,
        )
        for i in range(24)
    ]
    for request in requests:
        engine.submit(request)
    events = run_all(engine)
    for request in requests:
        assert tokens_of(events[request.id]) == expected_tokens(request, limit, eos_every=30)
        assert [event.finish is None for event in events[request.id]][-1:] == [False]
    assert max(plan.iterations for plan in plans) > 1
    engine.fake_pool.check_integrity()
    assert engine.fake_executor.steps == engine.stats().steps.count == engine._scheduler.stats().steps


@pytest.mark.parametrize("max_iterations", [2, 9])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_exactly_once_under_random_cancels_and_interruptions(seed, max_iterations):
    draw = random.Random(seed)
    engine, _ = make_engine(
        "fake?eos_every=12",
        "fake?eos_every=12",
        blocks=20,
        scheduler={"max_iterations": max_iterations, "max_batched_tokens": 12},
    )
    engine.interrupted = lambda: draw.random() < 0.2
    plans = watch_plans(engine)
    requests, events = {}, {}
    while len(requests) < 80 or engine.busy:
        if len(requests) < 80 and draw.random() < 0.2:
            request = make_request(
                f"r{len(requests)}",
                prompt=draw.randint(1, 15),
                service="ab"[draw.random() < 0.1],
                max_tokens=draw.randint(1, 30),
            )
            requests[request.id], events[request.id] = request, []
            engine.submit(request)
        if requests and draw.random() < 0.1:
            engine.cancel(draw.choice(list(requests)[-10:]))
        for event in engine.step():
            events[event.request_id].append(event)
        engine.fake_pool.check_integrity()
    for name, request in requests.items():
        assert [event.finish is not None for event in events[name]].count(True) == 1
        assert events[name][-1].finish is not None
        full = expected_tokens(request, request.sampling.max_tokens, eos_every=12)
        output = tokens_of(events[name])
        assert output == full[: len(output)]
        assert len(output) == len(full) or events[name][-1].finish is FinishReason.CANCELLED
    assert max(plan.iterations for plan in plans) > 1
    assert sum(service.live_blocks for service in engine.stats().services.values()) == 0


def test_a_plan_of_several_iterations_ends_with_the_step_that_ends_a_request():
    engine, _ = make_engine(scheduler={"max_iterations": 8})
    plans = watch_plans(engine)
    for name, most in (("short", 6), ("long", 20)):
        engine.submit(make_request(name, max_tokens=most))
    run_all(engine)
    # One token comes with the prompts.
    assert [plan.iterations for plan in plans] == [1, 5, 8, 6]
    assert [plan.number for plan in plans] == [0, 1, 6, 14]


def test_interrupted_steps_are_not_counted():
    engine, _ = make_engine(scheduler={"max_iterations": 8})
    engine.submit(make_request(max_tokens=20))
    plans = watch_plans(engine)
    engine.step()
    asked = iter([False, False, True])
    engine.interrupted = lambda: next(asked)
    [event] = engine.step()
    assert len(event.tokens) == 3
    assert engine.stats().steps.count == engine._scheduler.stats().steps == 4
    engine.interrupted = lambda: False
    engine.step()
    assert [(plan.number, plan.iterations) for plan in plans] == [(0, 1), (1, 8), (4, 8)]


def test_a_request_without_a_new_token_keeps_its_tokens():
    engine, _ = make_engine(scheduler={"max_iterations": 4})
    engine.submit(make_request("a", max_tokens=20))
    engine.submit(make_request("bb", max_tokens=20))
    engine.step()
    plan = engine._scheduler.schedule(0)
    assert plan.iterations == 4
    result = StepResult([[97, 97], [98, NO_TOKEN]], [1, 1])
    kept, lost = engine._scheduler.update(plan, result, 2)
    assert (kept.tokens, kept.finish) == ((97, 98), None)
    assert (lost.tokens, lost.finish) == ((97,), FinishReason.ERROR)


def test_a_plan_without_rows_is_accepted():
    """Such plans have only copies, or sequences that leave."""
    engine, _ = make_engine()
    scheduler, executor = engine._scheduler, engine.fake_executor
    engine.submit(make_request(max_tokens=2))
    run_all(engine)
    assert executor.sequences
    plan = StepPlan(
        number=9, service="a", seq_ids=(), new_tokens=(), sampled=(), left=tuple(executor.sequences)
    )
    scheduler._steps.in_flight.append(InFlightStep(plan, (PlannedRows(plan, [], slice(0), 0),), [], []))
    executor.submit(plan)
    result = executor.collect()
    assert [list(tokens) for tokens in result.tokens] == [[]]
    assert scheduler.update(plan, result, 1) == []
    assert not executor.sequences
    assert scheduler.in_flight == 0


def test_an_end_of_sequence_token_has_no_text():
    engine, _ = make_engine("fake?eos_every=5", scheduler={"max_iterations": 8})
    engine.submit(make_request(max_tokens=100))
    [*_, last] = run_all(engine)["r"]
    assert (last.finish, last.stop_token, last.tokens[-1]) == (FinishReason.STOP, EOS, EOS)
