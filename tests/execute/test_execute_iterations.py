"""Plans of several iterations, and plans without rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from execute_builders import GREEDY, HandScheduler, make_model, make_prompt, tiny_config

from shoal.core import ANONYMOUS_TOKEN, NO_TOKEN, BlockCopy, NewSequence, SamplingParams, StepPlan, StepResult
from shoal.execute.protocol import Interrupted, never
from shoal.execute.sampling.sampler import Sampled
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel
from shoal.forecast import FittedTimes, LatencyModel

OUTPUT = 12
EOS = 2
SAMPLE = "shoal.execute.torch_executor.sample"
PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=1.5, presence_penalty=0.5, logprobs=0),
)
SIMULATED = FittedTimes(
    LatencyModel(constant_s=1e-3, sequence_s=1e-4, token_s=1e-5, context_s=1e-6, work_s=0.0)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("iterations") / "llama", tiny_config("llama"))


@pytest.fixture
def hand(folder: Path) -> HandScheduler:
    return HandScheduler({"a": folder})


def start(hand: HandScheduler, params: Sequence[SamplingParams], prompt: int = 9) -> list[int]:
    """Compute a prompt for each; their first tokens."""
    prompts = [make_prompt(prompt + number, seed=number) for number in range(len(params))]
    joined = [
        NewSequence(
            number, tokens, len(tokens), 0, hand.blocks("a", len(tokens) + OUTPUT), sampling, seed=number
        )
        for number, (tokens, sampling) in enumerate(zip(prompts, params, strict=True))
    ]
    rows = tuple(range(len(params)))
    plan = StepPlan(
        number=0,
        service="a",
        seq_ids=rows,
        new_tokens=tuple([len(tokens) for tokens in prompts]),
        sampled=rows,
        joined=tuple(joined),
    )
    hand.executor.submit(plan)
    return list(hand.executor.collect().tokens[0])


def decode(hand: HandScheduler, rows: int, iterations: int, interrupted: Interrupted = never) -> StepResult:
    row_indices = tuple(range(rows))
    plan = StepPlan(
        number=1,
        service="a",
        seq_ids=row_indices,
        new_tokens=(1,) * rows,
        sampled=row_indices,
        iterations=iterations,
    )
    hand.executor.submit(plan, interrupted)
    return hand.executor.collect()


def test_iterations_are_successive_steps(folder: Path) -> None:
    """The same tokens and log-probabilities, bit for bit."""
    single, several = HandScheduler({"a": folder}), HandScheduler({"a": folder})
    assert start(single, PARAMS) == start(several, PARAMS)
    steps = [decode(single, len(PARAMS), 1) for _ in range(OUTPUT - 1)]
    result = decode(several, len(PARAMS), OUTPUT - 1)
    assert result.counts is None
    assert [list(tokens) for tokens in result.tokens] == [list(step.tokens[0]) for step in steps]
    assert result.logprobs is not None
    assert list(result.logprobs) == [step.logprobs[0] for step in steps if step.logprobs is not None]
    assert [row is None for row in result.logprobs[0]] == [True, False, True, False]
    assert len(result.durations_ns) == OUTPUT - 1
    timings = result.timings
    assert timings.prepare_ns + timings.forward_ns + timings.sample_ns == result.duration_ns


def test_an_iteration_that_ends_a_row_is_the_last(folder: Path) -> None:
    reference = HandScheduler({"a": folder})
    start(reference, PARAMS[1:3])
    tokens = [list(row) for row in decode(reference, 2, OUTPUT - 1).tokens]
    second = [row[1] for row in tokens]
    stop = next(token for token in second[3:] if token not in second[:3])
    stopping = replace(PARAMS[2], stop_token_ids=(stop,))
    hand = HandScheduler({"a": folder})
    start(hand, [PARAMS[1], stopping])
    result = decode(hand, 2, OUTPUT - 1)
    assert [list(row) for row in result.tokens] == tokens[: second.index(stop) + 1]


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_sequence_counts_unless_it_is_ignored(
    hand: HandScheduler, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    monkeypatch.setattr(SAMPLE, lambda logits, rows, *_: Sampled([EOS] * len(rows), None, {}))
    start(hand, [SamplingParams(temperature=0.0, ignore_eos=ignored)])
    assert len(decode(hand, 1, 4).tokens) == (4 if ignored else 1)


def test_an_end_token_before_min_tokens_does_not_end_the_plan(
    hand: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAMPLE, lambda logits, rows, *_: Sampled([7] * len(rows), None, {}))
    start(hand, [SamplingParams(temperature=0.0, stop_token_ids=(7,), min_tokens=4)])
    assert len(decode(hand, 1, 8).tokens) == 3


def test_a_row_without_a_token_ends_the_plan(hand: HandScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    start(hand, PARAMS)
    forward = hand.executor._forward
    calls = []

    def overflowing(*args: object) -> torch.Tensor:
        calls.append(args)
        logits = forward(*args)  # type: ignore[arg-type]
        if len(calls) == 3:
            logits[1] = float("nan")
            logits[3] = float("nan")
        return logits

    monkeypatch.setattr(hand.executor, "_forward", overflowing)
    result = decode(hand, len(PARAMS), 8)
    assert len(result.tokens) == 3
    assert [token == NO_TOKEN for token in result.tokens[-1]] == [False, True, False, True]
    assert result.logprobs is not None
    assert result.logprobs[-1] == [None] * 4


def test_an_arrival_ends_the_plan_after_the_current_iteration(hand: HandScheduler) -> None:
    start(hand, PARAMS)
    interrupts = iter([False, True])
    assert len(decode(hand, len(PARAMS), 8, lambda: next(interrupts)).tokens) == 2
    assert len(decode(hand, len(PARAMS), 1, lambda: True).tokens) == 1


def test_a_plan_without_rows_copies_and_removes_sequences(hand: HandScheduler) -> None:
    start(hand, [GREEDY])
    [source], [target] = hand.blocks("a", 1), hand.blocks("a", 1)
    store = hand.executor.store
    stride = hand.layout.services["a"].stride_bytes
    written = store.buffer[source * stride : (source + 1) * stride]
    written.fill_(7)
    plan = StepPlan(
        number=1,
        service="a",
        seq_ids=(),
        new_tokens=(),
        sampled=(),
        left=(0,),
        copies=(BlockCopy("a", source, target),),
    )
    hand.executor.submit(plan)
    result = hand.executor.collect()
    assert [list(tokens) for tokens in result.tokens] == [[]]
    assert result.logprobs is None
    assert len(result.durations_ns) == 1
    assert (store.buffer[target * stride : (target + 1) * stride] == 7).all()
    with pytest.raises(KeyError):
        decode(hand, 1, 1)


def simulated() -> tuple[SimulatedExecutor, list[int]]:
    now_ns = [0]
    models = {"a": SimulatedModel(times=SIMULATED, copy_s=0.5)}
    executor = SimulatedExecutor(models, lambda: now_ns[0], lambda plan, start_ns, end_ns: None)
    plan = StepPlan(
        number=0,
        service="a",
        seq_ids=(0, 1),
        new_tokens=(5, 6),
        sampled=(0, 1),
        joined=tuple([NewSequence(n, range(5 + n), 5 + n, 0, (n,), GREEDY, seed=0) for n in (0, 1)]),
    )
    executor.submit(plan)
    now_ns[0] += executor.collect().duration_ns
    return executor, now_ns


def decoding(iterations: int) -> StepPlan:
    return StepPlan(
        number=1, service="a", seq_ids=(0, 1), new_tokens=(1, 1), sampled=(0, 1), iterations=iterations
    )


def test_simulated_iterations_take_as_long_as_steps() -> None:
    single, now_ns = simulated()
    durations_ns = []
    for _ in range(6):
        single.submit(decoding(1))
        durations_ns.append(single.collect().duration_ns)
        now_ns[0] += durations_ns[-1]
    several, now_ns = simulated()
    for count in (4, 2):
        several.submit(decoding(count))
        result = several.collect()
        assert [list(row) for row in result.tokens] == [[ANONYMOUS_TOKEN] * 2] * count
        now_ns[0] += result.duration_ns
        assert list(result.durations_ns) == durations_ns[:count]
        del durations_ns[:count]


def test_an_arrival_in_a_simulation_ends_the_plan_after_the_current_iteration() -> None:
    whole, _ = simulated()
    whole.submit(decoding(6))
    ends_ns = whole.iteration_ends_ns
    executor, now_ns = simulated()
    executor.submit(decoding(6))
    now_ns[0] = ends_ns[2] + 1
    executor.interrupt()
    assert executor.ends_ns == ends_ns[3]
    assert len(executor.collect().tokens) == 4
    now_ns[0] = ends_ns[3]
    executor.submit(decoding(2))
    assert executor.iteration_ends_ns == ends_ns[4:]


def test_a_simulated_plan_without_rows_takes_the_time_of_its_copies() -> None:
    executor, _ = simulated()
    plan = StepPlan(
        number=1,
        service="a",
        seq_ids=(),
        new_tokens=(),
        sampled=(),
        left=(0, 1),
        swap_out_copies=(BlockCopy("a", 0, 0, target_host=True), BlockCopy("a", 1, 1, target_host=True)),
    )
    executor.submit(plan)
    result = executor.collect()
    assert [list(tokens) for tokens in result.tokens] == [[]]
    assert result.duration_ns == pytest.approx(1e9)
