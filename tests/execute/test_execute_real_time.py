"""The executor that sleeps: ends of its steps on a clock that its sleeps alone move, and its tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import Arrival, NewSequence, SamplingParams, StepPlan
from shoal.execute.fetch_link import FetchTimes
from shoal.execute.real_time import RealTimeExecutor
from shoal.execute.simulated import SimulatedModel
from shoal.forecast import FittedTimes, LatencyModel

pytestmark = pytest.mark.without_native

SECOND = 1_000_000_000
TIMES = FittedTimes(LatencyModel(constant_s=1.0, sequence_s=0, token_s=0.01, context_s=0, work_s=0))
"""A step takes a second, and a hundredth of one for each token."""
WORDS = tuple(range(10, 40))
GREEDY = SamplingParams(temperature=0.0)


class Clock:
    """A clock that stands still but for sleeps."""

    def __init__(self) -> None:
        self.now_ns = 1234 * SECOND
        self.sleeps: list[float] = []

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_ns += round(seconds * 1e9)


def make(clock: Clock | None = None, copy_s: float = 0.0, **fetch_s: float) -> RealTimeExecutor:
    clock = clock or Clock()
    return RealTimeExecutor(
        {"a": SimulatedModel(times=TIMES, copy_s=copy_s)},
        {"a": WORDS},
        FetchTimes(seconds=fetch_s),
        clock=clock,
        sleep=clock.sleep,
    )


def joining(
    number: int, tokens: Sequence[int], prompt: int, sampling: SamplingParams = GREEDY, seed: int = 0
) -> NewSequence:
    return NewSequence(number, tuple(tokens), prompt, 0, (number,), sampling, seed=seed)


def plan(
    seq_ids: tuple[int, ...] = (),
    new_tokens: tuple[int, ...] = (),
    *,
    sampled: tuple[int, ...] | None = None,
    joined: tuple[NewSequence, ...] = (),
    **further,
) -> StepPlan:
    return StepPlan(
        number=0,
        service="a",
        seq_ids=seq_ids,
        new_tokens=new_tokens,
        sampled=tuple(range(len(seq_ids))) if sampled is None else sampled,
        joined=joined,
        **further,
    )


def prefill(number: int, tokens: Sequence[int] = (1, 2, 3), **sequence) -> StepPlan:
    new = joining(number, tokens, **{"prompt": len(tokens)} | sequence)
    return plan((number,), (len(tokens),), joined=(new,))


def tokens_of(executor: RealTimeExecutor, plan: StepPlan, interrupted=lambda: False) -> list[list[int]]:
    executor.submit(plan, interrupted)
    return [list(tokens) for tokens in executor.collect().tokens]


def test_a_step_takes_the_time_of_the_model_in_collect():
    clock = Clock()
    executor = make(clock)
    executor.submit(prefill(0))
    assert not clock.sleeps, "submit returns at once"
    result = executor.collect()
    assert clock.sleeps == [1.03]
    assert result.durations_ns == [1_030_000_000]
    assert result.timings.forward_ns == result.duration_ns


def test_two_plans_run_back_to_back():
    clock = Clock()
    executor = make(clock)
    executor.submit(prefill(0))
    clock.now_ns += SECOND // 2
    executor.submit(plan((0,), (1,)))
    executor.collect()
    clock.now_ns += SECOND // 4  # the host is busy while the second plan runs
    assert executor.collect().durations_ns == [1_010_000_000]
    assert clock.sleeps == [pytest.approx(0.53), pytest.approx(0.76)]
    assert clock.now_ns == 1234 * SECOND + 2_040_000_000


def test_a_late_host_does_not_wait():
    clock = Clock()
    executor = make(clock)
    executor.submit(prefill(0))
    clock.now_ns += 5 * SECOND
    executor.collect()
    executor.submit(plan((0,), (1,)))
    executor.collect()
    assert clock.sleeps == [1.01], "a step begins when it is submitted, not when it could have begun"


def test_a_sleep_that_ends_early_goes_on():
    clock = Clock()
    executor = make(clock)

    def half(seconds: float) -> None:
        clock.sleeps.append(seconds)
        clock.now_ns += max(1, round(seconds * 0.5e9))

    executor._sleep = half
    executor.submit(prefill(0))
    executor.collect()
    assert clock.now_ns >= 1234 * SECOND + 1_030_000_000
    assert len(clock.sleeps) > 1


def test_iterations_go_on_until_they_are_interrupted():
    clock = Clock()
    executor = make(clock)
    tokens_of(executor, prefill(0))
    started_ns = clock.now_ns
    asked = []

    def interrupted() -> bool:
        asked.append(clock.now_ns - started_ns)
        return len(asked) == 3

    executor.submit(plan((0,), (1,), iterations=8), interrupted)
    result = executor.collect()
    assert asked == [1_010_000_000, 2_020_000_000, 3_030_000_000]
    assert len(result.tokens) == 3
    assert result.durations_ns == [1_010_000_000] * 3
    assert clock.now_ns - started_ns == 3_030_000_000
    executor.submit(plan((0,), (1,)))
    assert executor.collect().duration_ns == 1_010_000_000, (
        "the next plan does not wait for what was left out"
    )
    assert clock.now_ns - started_ns == 4_040_000_000


def test_all_iterations_are_made_where_nothing_comes():
    executor = make()
    tokens_of(executor, prefill(0))
    assert len(tokens_of(executor, plan((0,), (1,), iterations=5))) == 5


def test_a_stop_token_ends_the_iterations():
    free = make()
    plain = [token for [token] in tokens_of(free, prefill(0))]
    plain += [token for [token] in tokens_of(free, plan((0,), (1,), iterations=6))]
    stop = plain[3]
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    executor = make()
    made = tokens_of(executor, prefill(0, sampling=sampling))
    made += tokens_of(executor, plan((0,), (1,), iterations=6))
    assert [token for [token] in made] == plain[: 1 + plain.index(stop)]


def test_weights_come_while_steps_go_on_and_end_the_iterations():
    clock = Clock()
    executor = make(clock, x=2.5)
    executor.submit(plan(fetch=("x",)))
    assert executor.collect().tokens == [[]]
    assert not clock.sleeps
    tokens_of(executor, prefill(0))
    assert not executor.arrivals()
    assert len(tokens_of(executor, plan((0,), (1,), iterations=9))) == 2, "they come in the second of them"
    assert executor.arrivals() == [Arrival("x", 2.5)]
    assert not executor.arrivals()


def test_kv_is_empty_and_its_copies_take_time():
    clock = Clock()
    executor = make(clock, copy_s=0.125)
    content = executor.read_blocks("a", [1, 2, 3])
    assert (content.nbytes, clock.sleeps) == (0, [0.375])
    executor.write_blocks("a", [4], content)
    assert clock.sleeps == [0.375, 0.125]
    with pytest.raises(ValueError, match="no bytes"):
        executor.write_blocks("a", [4], memoryview(b"KV"))


def test_services_come_and_go():
    executor = make()
    executor.add_service("b", SimulatedModel(times=TIMES), (77,))
    new = plan((5,), (2,), joined=(joining(5, (1, 2), 2),))
    object.__setattr__(new, "service", "b")
    assert tokens_of(executor, new) == [[77]]
    tokens_of(executor, plan(left=(5,)))
    executor.remove_service("b")
    assert len(tokens_of(executor, prefill(0))[0]) == 1


def test_choices_with_a_temperature_differ_by_their_seeds_and_greedy_ones_do_not():
    warm = SamplingParams(temperature=0.7)

    def output(sampling: SamplingParams, seed: int) -> list[list[int]]:
        executor = make()
        first = tokens_of(executor, prefill(0, sampling=sampling, seed=seed))
        return first + tokens_of(executor, plan((0,), (1,), iterations=8))

    assert output(GREEDY, 1) == output(GREEDY, 2)
    assert output(warm, 1) == output(warm, 1)
    assert output(warm, 1) != output(warm, 2)


OUTPUT = 12
EVENTS = st.lists(
    st.one_of(st.tuples(st.just("iterations"), st.integers(1, 4)), st.just("rejoin")), max_size=12
)


def undisturbed(prompt: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
    executor = make()
    made = tokens_of(executor, prefill(0, prompt, sampling=sampling, seed=seed))
    made += tokens_of(executor, plan((0,), (1,), iterations=OUTPUT - 1))
    return [token for [token] in made]


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    EVENTS,
    st.data(),
    st.booleans(),
    st.integers(0, 2**63 - 1),
)
def test_tokens_depend_on_those_before_alone(prompt, events, data, greedy, seed):
    """However the prompt is cut, whoever is beside it, and however often the sequence leaves and returns."""
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0, seed=seed)
    executor, number = make(), 0
    output: list[int] = []

    def join() -> None:
        """Computes all known tokens, in chunks, of which the last one samples."""
        tokens = [*prompt, *output]
        new, left = joining(number, tokens, len(prompt), sampling, seed), len(tokens)
        while left:
            count = data.draw(st.integers(1, left), "chunk")
            left -= count
            sampled = () if left else (0,)
            made = tokens_of(
                executor, plan((number,), (count,), sampled=sampled, joined=(new,) if new else ())
            )
            new = None
            assert len(made[0]) == len(sampled)
        output.append(made[0][0])

    other = joining(999, (3, 4), 2)
    tokens_of(executor, plan((999,), (2,), joined=(other,)))
    join()
    for event in events:
        if event == "rejoin":
            tokens_of(executor, plan(left=(number,)))
            number += 1
            join()
        else:
            made = tokens_of(executor, plan((999, number), (1, 1), iterations=event[1]))
            output += [token for _, token in made]
    assert set(output) <= set(WORDS)
    plain = undisturbed(prompt, sampling, seed)
    assert output[:OUTPUT] == plain[: len(output)]


@given(st.lists(st.integers(0, 200), min_size=2, max_size=12), st.integers(0, 11), st.integers(1, 5))
def test_another_token_before_changes_the_tokens_behind(prompt, place, by):
    changed = list(prompt)
    changed[place % len(prompt)] += by
    assert undisturbed(prompt, GREEDY, 0) != undisturbed(changed, GREEDY, 0)
