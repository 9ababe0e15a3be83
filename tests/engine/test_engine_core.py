import random
from dataclasses import replace

import pytest
from engine_builders import (
    EOS,
    FAILING_TOKEN,
    SHAPE,
    expected_tokens,
    make_engine,
    make_request,
    run_all,
)

from shoal.core import SLO, EngineDied, FinishReason, InvalidRequest
from shoal.forecast import Accuracy, Spread


def tokens_of(events: list) -> list[int]:
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [16, 200])
def test_outputs_do_not_depend_on_batch_depth_or_preemptions(depth, blocks):
    engine, info = make_engine(
        "fake?eos_every=30",
        "fake?eos_every=30",
        blocks=blocks,
        scheduler={"depth": depth, "max_batched_tokens": 16},
    )
    limit = min(info.services["a"].max_total_tokens - 20, 24)
    requests = [
        make_request(
            f"r{i}", prompt=1 + 3 * i % 20, service="ab"[i % 2], temperature=i % 2, seed=i, max_tokens=limit
        )
        for i in range(24)
    ]
    for request in requests:
        engine.submit(request)
    events = run_all(engine)
    for request in requests:
        output = tokens_of(events[request.id])
        assert output == expected_tokens(request, limit, eos_every=30)
        [last] = [event for event in events[request.id] if event.finish is not None]
        assert last is events[request.id][-1]
        assert last.finish == (FinishReason.STOP if output[-1] == EOS else FinishReason.LENGTH)
    assert engine.fake_executor.most_in_flight == depth
    engine.fake_pool.check_integrity()


@pytest.mark.parametrize("depth", [1, 2])
def test_admissions_and_preemptions_are_told_in_turns(depth):
    engine, _ = make_engine("fake", "fake", blocks=16, scheduler={"depth": depth, "max_batched_tokens": 16})
    told: dict[str, list[bool]] = {}
    engine.observe_transitions(lambda id, runs: told.setdefault(id, []).append(runs))
    for number in range(12):
        engine.submit(
            make_request(f"r{number}", prompt=1 + 3 * number % 20, service="ab"[number % 2], max_tokens=24)
        )
    run_all(engine)
    assert len(told) == 12
    for transitions in told.values():
        assert transitions == [place % 2 == 0 for place in range(len(transitions))]
        assert transitions[-1]
    preemptions = sum(service.preemptions for service in engine.stats().services.values())
    assert sum(len(transitions) // 2 for transitions in told.values()) == preemptions > 0


def test_an_engine_without_requests_is_idle():
    engine, _ = make_engine()
    assert engine.step() == []
    assert engine.idle
    assert engine.idle_until_ns is None
    engine.submit(make_request())
    assert not engine.idle
    run_all(engine)
    assert engine.unfinished == 0


def test_an_engine_is_not_idle_after_a_step_that_freed_memory():
    """With depth 2 a request that needs memory waits for the plans in flight."""
    engine, _ = make_engine(blocks=12, scheduler={"depth": 2})
    for number in range(6):
        engine.submit(make_request(f"r{number}", prompt=6, max_tokens=20))
    while engine.busy:
        engine.step()
        assert not (engine.unfinished and engine.idle)
    assert engine.stats().services["a"].preemptions > 0


def test_cancelling_a_waiting_request_ends_it_at_the_next_step():
    engine, _ = make_engine()
    engine.submit(make_request())
    engine.cancel("r")
    engine.cancel("unknown")
    assert engine.unfinished == 1
    [event] = engine.step()
    assert (event.request_id, event.finish) == ("r", FinishReason.CANCELLED)
    assert engine.unfinished == 0
    assert engine.fake_executor.steps == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_past_its_slo_is_rejected_with_an_event(depth):
    scheduler = {"depth": depth, "max_running": 1, "on_hopeless": "refuse"}
    engine, _ = make_engine("fake?step_ms=10", scheduler=scheduler)
    engine.submit(make_request("runs", max_tokens=40))
    now_ns = engine.now_ns()
    engine.submit(replace(make_request("late"), arrival_ns=now_ns, slo=SLO(ttft_s=0.2)))
    engine.submit(replace(make_request("gone"), arrival_ns=now_ns - 10**9, slo=SLO(e2e_s=0.5)))
    ends = {event.request_id: event for event in engine.step() if event.finish}
    assert ends.keys() == {"gone"}
    while engine.busy:
        ends |= {event.request_id: event for event in engine.step() if event.finish}
        engine.fake_pool.check_integrity()
    assert list(ends) == ["gone", "late", "runs"]
    assert {name: end.finish for name, end in ends.items()} == {
        "gone": FinishReason.REFUSED,
        "late": FinishReason.REFUSED,
        "runs": FinishReason.LENGTH,
    }
    assert "ttft 0.2 s" in ends["late"].error
    assert engine.stats().services["a"].live_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_cancelling_a_running_request_frees_it_within_a_step(depth):
    engine, _ = make_engine(scheduler={"depth": depth})
    engine.submit(make_request(max_tokens=100))
    for _ in range(5):
        engine.step()
    engine.cancel("r")
    events = [event for _ in range(depth) for event in engine.step()]
    assert [event.finish for event in events if event.finish] == [FinishReason.CANCELLED]
    assert engine.unfinished == 0
    assert engine.stats().services["a"].live_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_exactly_once_under_random_cancels(seed, depth):
    draw = random.Random(seed)
    engine, _ = make_engine(
        "fake?eos_every=12",
        "fake?eos_every=12",
        blocks=20,
        scheduler={"depth": depth, "max_batched_tokens": 12},
    )
    ends: dict[str, list[FinishReason]] = {}
    ids: list[str] = []
    while len(ids) < 120 or engine.busy:
        if len(ids) < 120 and draw.random() < 0.4:
            ids.append(f"r{len(ids)}")
            ends[ids[-1]] = []
            engine.submit(
                make_request(
                    ids[-1],
                    prompt=draw.randint(1, 15),
                    service=draw.choice("ab"),
                    max_tokens=draw.randint(1, 30),
                )
            )
        if ids and draw.random() < 0.2:
            engine.cancel(draw.choice(ids[-10:]))
        for event in engine.step():
            assert not ends[event.request_id], "an event after the end"
            if event.finish is not None:
                ends[event.request_id].append(event.finish)
        engine.fake_pool.check_integrity()
    assert all(len(reasons) == 1 for reasons in ends.values())
    kinds = {reason for reasons in ends.values() for reason in reasons}
    assert kinds == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    usage = engine.stats()
    assert sum(service.live_blocks for service in usage.services.values()) == 0


def test_an_error_of_the_executor_ends_the_engine():
    engine, _ = make_engine()
    engine.submit(make_request(prompt=[1, FAILING_TOKEN]))
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    with pytest.raises(EngineDied, match="on fire"):
        engine.submit(make_request("again"))
    with pytest.raises(EngineDied, match="on fire"):
        engine.step()


def test_a_request_that_can_never_fit_is_rejected():
    engine, info = make_engine(blocks=8)
    room = info.services["a"].max_total_tokens
    engine.submit(make_request("fits", prompt=room - 4, max_tokens=4))
    with pytest.raises(InvalidRequest):
        engine.submit(make_request("no", prompt=room - 4, max_tokens=5))
    assert list(run_all(engine)) == ["fits"]


def test_stats_count_requests_and_tokens():
    engine, _ = make_engine("fake", "fake")
    engine.submit(make_request("one", prompt=5, max_tokens=3))
    engine.submit(make_request("two", prompt=6, max_tokens=4, service="b"))
    assert engine.stats().services["a"].waiting == 1
    run_all(engine)
    engine.submit(make_request("three", prompt=6, max_tokens=4, service="b"))
    engine.cancel("three")
    engine.step()
    engine.add_reply_time(17)
    stats = engine.stats()
    a, b = stats.services["a"], stats.services["b"]
    assert (a.finished, a.prompt_tokens, a.output_tokens) == (1, 5, 3)
    assert (b.finished, b.cancelled, b.output_tokens) == (1, 1, 4)
    assert a.waiting == a.running == b.waiting == b.running == 0
    assert stats.steps.count == engine.fake_executor.steps
    assert stats.steps.schedule_ns > 0
    assert stats.steps.update_ns > 0
    assert stats.steps.reply_ns == 17
    assert stats.pool.live_bytes == 0
    assert stats.pool.total_bytes > 0


def test_stats_have_the_traffic_of_each_service():
    engine, _ = make_engine("fake", "fake")
    for id, prompt, tokens in (("one", 4, 2), ("two", 8, 6)):
        engine.submit(make_request(id, prompt=prompt, max_tokens=tokens, ignore_eos=True))
    run_all(engine)
    stats = engine.stats()
    observed, quiet = stats.services["a"].observed, stats.services["b"].observed
    assert (observed.traffic.prompt_tokens, observed.traffic.output_tokens) == (Spread(6, 2), Spread(4, 2))
    assert observed.traffic.arrivals_per_s == pytest.approx(2, rel=0.9)
    assert observed.traffic.latency_s > observed.traffic.ttft_s > 0
    assert (observed.accuracy, observed.corrections) == (None, None), "nothing is learned by default"
    assert (quiet.traffic.finished, quiet.traffic.arrivals_per_s) == (0, 0)
    assert quiet.traffic.prompt_tokens is quiet.traffic.latency_s is quiet.traffic.attainment is None


def test_stats_have_the_accuracy_of_predicted_lengths():
    engine, _ = make_engine("fake?context=200", scheduler={"lengths": "learned"})
    assert engine.stats().services["a"].observed.accuracy == Accuracy(hits=0, majority=0, samples=0)
    for number in range(40):
        engine.submit(make_request(f"r{number}", prompt=5, max_tokens=8, ignore_eos=True))
        run_all(engine)
    accuracy = engine.stats().services["a"].observed.accuracy
    assert (accuracy.hits, accuracy.majority, accuracy.samples) == (40, 40, 40)
    assert engine.stats().services["a"].observed.corrections == 0


def test_closing_closes_the_executor():
    engine, _ = make_engine()
    engine.close()
    assert engine.fake_executor.closed


def test_unfilled_slots_are_counted_in_tokens_and_bytes():
    engine, info = make_engine("fake", "fake", blocks=10)
    assert {service.kv_tokens for service in info.services.values()} == {10 * 4}
    engine.submit(make_request(prompt=[97] * 5))
    engine.step()
    stats = engine.stats()
    # 5 of the 8 slots of two blocks hold KV.
    assert [stats.services[name].unfilled_tokens for name in "ab"] == [3, 0]
    assert stats.pool.unfilled_bytes == 3 * SHAPE.token_bytes()
