"""Which engine a policy chooses, and what it knows of engines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_builders import SECOND, Bench, dispatched

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import DISPATCHES, dispatch_named
from shoal.cluster.manager.engine_load import INDEXED_BLOCKS, EngineLoad, UnassignedRequest
from shoal.cluster.manager.events import ServiceSpeed, Submitted
from shoal.cluster.manager.expected_lengths import UNKNOWN_TOKENS, ExpectedLengths
from shoal.core import ConfigError

FAST, SLOW = ServiceSpeed(0.001, 0.01), ServiceSpeed(0.004, 0.04)


def unassigned(
    request: str = "new",
    *,
    service: str = "a",
    prompt: int = 100,
    tokens: int = 50,
    choices: int = 1,
    prefix: tuple[int, ...] = (),
    now_ns: int = 0,
) -> UnassignedRequest:
    call = Submitted(request, service, prompt, 1000, choices, prefix)
    return UnassignedRequest(call, tokens, turn=0, now_ns=now_ns)


def load(
    *held: UnassignedRequest, speed: ServiceSpeed = FAST, name: str = "e", kv_tokens: int | None = None
) -> EngineLoad:
    engine = EngineLoad(name, indexes_prefixes=True)
    engine.kv_tokens = {} if kv_tokens is None else {"a": kv_tokens, "b": 2 * kv_tokens}
    engine.begin({"a": speed, "b": speed})
    for one in held:
        engine.add(one)
    return engine


def chosen(dispatch: str, new: UnassignedRequest, *engines: EngineLoad) -> int:
    return engines.index(DISPATCHES[dispatch].choose(new, engines))


def test_an_unknown_dispatch_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ConfigError, match="possible are round-robin, least-requests, least-loaded, max-min"):
        dispatch_named("fastest")


def test_round_robin_takes_turns_by_service() -> None:
    bench = Bench(dispatch="round-robin")
    bench.add("e0", "e1", "e2", services=("a", "b"))
    order = ["a", "a", "b", "a", "b", "a"]
    sent = [dispatched(bench.submit(f"r{at}", service))[0][1] for at, service in enumerate(order)]
    assert sent == ["e0", "e1", "e0", "e2", "e1", "e0"]


@pytest.mark.parametrize("dispatch", ["least-requests", "least-loaded"])
def test_least_requests_counts_choices(dispatch: str) -> None:
    two, one = load(unassigned("x", choices=2)), load(unassigned("y"))
    assert chosen(dispatch, unassigned(), two, one) == 1
    two.remove("x")
    assert chosen(dispatch, unassigned(), two, one) == 0
    assert chosen(dispatch, unassigned(), one, load(unassigned("z"))) == 0


def test_max_min_takes_the_least_sum_of_estimated_times() -> None:
    many = load(*(unassigned(f"s{number}", prompt=10, tokens=5) for number in range(5)))
    long = load(unassigned("l", prompt=1000, tokens=400))
    assert chosen("max-min", unassigned(), many, long) == 0
    long.remove("l")
    assert chosen("max-min", unassigned(), many, long) == 1


def test_max_min_prefers_faster_engines_as_far_as_that_pays() -> None:
    fast, slow = load(speed=FAST), load(speed=SLOW)
    counts = [0, 0]
    for number in range(50):
        new = unassigned(f"r{number}")
        at = chosen("max-min", new, slow, fast)
        counts[at] += 1
        (slow, fast)[at].add(new)
    assert counts == [10, 40]


@pytest.mark.parametrize("dispatch", ["max-min", "prefix", "forecast"])
def test_an_engine_with_little_memory_gets_as_much_as_it_has_room_for(dispatch: str) -> None:
    """One of 16 times the memory; each request is to have 150 tokens in the end."""
    small, large = load(kv_tokens=320, name="small"), load(kv_tokens=16 * 320, name="large")
    counts = [0, 0]
    for number in range(51):
        new = unassigned(f"r{number}")
        at = chosen(dispatch, new, small, large)
        counts[at] += 1
        (small, large)[at].add(new)
        if number == 35:
            assert counts[0] <= 2, "both have room up to here"
    # Beyond that both have too much, in proportion.
    assert 2 <= counts[0] <= (4 if dispatch != "prefix" else 5)


def test_what_a_request_takes_of_the_memory_follows_from_its_service_and_choices() -> None:
    engine = load(unassigned("x", prompt=100, tokens=50, choices=3), kv_tokens=1000)
    assert engine.filled == 250_000
    engine.add(unassigned("y", service="b", prompt=100, tokens=50))
    assert engine.filled == 325_000
    engine.remove("x")
    engine.remove("y")
    assert engine.filled == 0


def test_prefix_leaves_an_engine_whose_memory_is_too_small_where_another_has_enough() -> None:
    new = unassigned(prefix=(1, 2, 3))
    cached = load(unassigned("x", prefix=(1, 2, 3)), kv_tokens=200)
    assert chosen("prefix", new, load(kv_tokens=200), cached) == 0
    assert chosen("prefix", new, load(kv_tokens=100), cached) == 1, "both are too small, as much"
    assert (
        chosen("prefix", new, load(kv_tokens=200), load(unassigned("x", prefix=(1, 2, 3)), kv_tokens=240))
        == 1
    )


def test_the_time_of_a_request_is_that_of_its_prompt_and_all_its_choices() -> None:
    engine = load(unassigned(prompt=100, tokens=50, choices=3))
    assert engine.remaining_ns == pytest.approx((0.1 + 1.5) * SECOND)
    assert engine.unfinished == 3
    engine.remove("new")
    assert (engine.remaining_ns, engine.unfinished) == (0, 0)


def test_forecast_takes_the_engine_with_the_lowest_peak() -> None:
    # Both hold as many requests and tokens, but those of the second will have ended soon.
    staying = load(*(unassigned(f"x{number}", prompt=500, tokens=400) for number in range(2)))
    leaving = load(*(unassigned(f"y{number}", prompt=500, tokens=10) for number in range(2)))
    assert chosen("forecast", unassigned(tokens=100), staying, leaving) == 1


def test_a_forecast_knows_progress_from_the_time_that_passed() -> None:
    engine = load(unassigned("x", prompt=100, tokens=50))
    # 0.1 s of prefill, then a token each 0.01 s: 20 tokens are there, and 30 more to come.
    new = unassigned(prompt=10, tokens=10, now_ns=round(0.3 * SECOND))
    assert engine.peak_share(new) == max(120 + 10 + 2 * 10, 120 + 30)
    # However late it is, an unfinished request has a token to come.
    assert engine.peak_share(new._replace(now_ns=9 * SECOND)) == max(149 + 1 + 10 + 1, 10 + 10)


@given(
    held=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=6),
    service=st.sampled_from("ab"),
)
@settings(max_examples=examples(100))
def test_a_forecast_is_the_most_tokens_at_any_time(held: list[tuple[int, int]], service: str) -> None:
    held_by = [unassigned(f"r{at}", prompt=prompt, tokens=tokens) for at, (prompt, tokens) in enumerate(held)]
    new = unassigned(service=service, prompt=20, tokens=30)
    peaks = []
    for each in "ab":
        rows = [(one.call.prompt_tokens, one.tokens) for one in (*held_by, new) if one.call.service == each]
        peaks.append(
            max((sum(now + at for now, left in rows if left >= at) for at in range(1, 51)), default=0)
        )
    assert load(*held_by).peak_share(new) == sum(peaks)


def test_prefix_takes_the_engine_that_has_seen_most_of_the_prompt() -> None:
    other = unassigned("x", prefix=(9, 2, 3))
    first, second = load(unassigned("y", prefix=(1,))), load(unassigned("z", prefix=(1, 2, 4)))
    third = load(other)
    new = unassigned(prefix=(1, 2, 3))
    assert [each.cached_blocks(new.call.prefix) for each in (first, second, third)] == [1, 2, 0]
    assert chosen("prefix", new, first, second, third) == 1


def test_prefix_leaves_an_engine_that_has_too_much_to_do() -> None:
    new = unassigned(prefix=(1, 2, 3))
    idle, cached = load(), load(unassigned("x", prefix=(1, 2, 3)))
    assert chosen("prefix", new, idle, cached) == 1
    for number in range(5):
        cached.add(unassigned(f"y{number}", prefix=(1, 2, 3)))
    assert chosen("prefix", new, idle, cached) == 0


def test_prefix_without_hashes_is_max_min() -> None:
    busy = load(unassigned("x"))
    assert chosen("prefix", unassigned(), busy, load()) == 1


def test_the_index_forgets_what_was_sent_long_ago_and_the_ends_of_prompts_first() -> None:
    engine = load(unassigned("old", prefix=(-1, -2, -3)))
    engine.add(unassigned("new", prefix=tuple(range(INDEXED_BLOCKS - 1))))
    assert engine.cached_blocks((-1, -2, -3)) == 1
    engine.add(unassigned("newer", prefix=(-9,)))
    assert engine.cached_blocks((-1, -2, -3)) == 0
    assert engine.cached_blocks(tuple(range(INDEXED_BLOCKS))) == INDEXED_BLOCKS - 1


def test_an_engine_that_was_started_again_has_nothing_cached() -> None:
    bench = Bench(dispatch="prefix")
    bench.add("e0", "e1")
    bench.submit("x", prefix=(1, 2))
    assert dispatched(bench.submit("y", prefix=(1, 2))) == [("y", "e0", 1)]
    bench.end("x")
    bench.end("y")
    bench.die("e0", 1)
    bench.wait(1, ("e1", 1))
    bench.ready("e0", 2)
    bench.submit("z", prefix=(7,))
    assert bench.manager.owner("z") == "e0"
    assert dispatched(bench.submit("w", prefix=(1, 2))) == [("w", "e1", 1)]


def test_expected_lengths_are_the_mean_of_answers_that_finished() -> None:
    lengths = ExpectedLengths()
    assert lengths.expected("a", 10_000) == UNKNOWN_TOKENS
    assert lengths.expected("a", 16) == 16
    for tokens in (10, 20, 60):
        lengths.record("a", tokens)
    assert lengths.expected("a", 10_000) == 30
    assert lengths.expected("a", 20) == 20
    assert lengths.expected("b", 10_000) == UNKNOWN_TOKENS


def test_a_manager_learns_lengths_from_ends() -> None:
    bench = Bench(dispatch="max-min")
    bench.add("e0", "e1", services=("a", "b"))
    for number in range(4):
        bench.submit(f"a{number}", "a", most=1000)
        bench.end(f"a{number}", 500)
        bench.submit(f"b{number}", "b", most=1000)
        bench.end(f"b{number}", 5)
    bench.submit("long", "a", most=1000)
    assert bench.manager.owner("long") == "e0"
    sent = [dispatched(bench.submit(f"s{number}", "b", most=1000))[0][1] for number in range(9)]
    assert sent == ["e1"] * 9


@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
def test_requests_that_left_weigh_nothing(dispatch: str) -> None:
    bench = Bench(dispatch=dispatch)
    bench.add("e0", "e1")
    for number in range(40):
        bench.submit(f"r{number}", choices=1 + number % 3)
    bench.die("e1", 1)
    for number in range(40):
        bench.end(f"r{number}")
    bench.wait(1, ("e0", 1))
    bench.ready("e1", 2)
    assert [engine.requests for engine in bench.manager.engines] == [0, 0]
    owners = {dispatched(bench.submit(f"s{number}"))[0][1] for number in range(2)}
    assert owners == {"e0", "e1"}
