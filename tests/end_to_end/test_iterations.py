"""A real model says the same whether the scheduler is asked before every step or before every few."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from end_to_end_builders import run_batch
from execute_builders import make_model, make_prompt, tiny_config

from at_hand import DEVICE
from shoal.core import FinishReason, SamplingParams, Service, StepPlan, StepResult
from shoal.engine import EngineOptions, build_engine
from shoal.execute.protocol import Executor, Interrupted, never
from shoal.frontend.offline_batch import Completion, OfflineBatch
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions

OUTPUT = 30
SERVICE = "a"


class Letters:
    """A letter for each token."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Watched:
    """Passes plans on, and keeps them."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.plans: list[StepPlan] = []
        self.stops: Interrupted = never

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        self.plans.append(plan)
        self.executor.submit(plan, self.stops)

    def collect(self) -> StepResult:
        return self.executor.collect()

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        return self.executor.ready(seq_ids)

    def close(self) -> None:
        self.executor.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("iterations") / "llama", tiny_config("llama"))


def answer(
    folder: Path,
    params: Sequence[SamplingParams],
    max_iterations: int,
    *,
    stops: Interrupted = never,
    memory_bytes: int = 4 << 20,
) -> tuple[list[Completion], Watched, Any]:
    """What becomes of a prompt for each, all at once; the plans; and the engine's counts."""
    made: list[Watched] = []

    def wrap(executor: Executor) -> Executor:
        made.append(Watched(executor))
        return made[0]

    options = EngineOptions(
        services=(Service(name=SERVICE, model=str(folder), dtype="float32"),),
        kv_cache=KVCacheOptions(memory_bytes=memory_bytes, block_size=4),
        scheduler=SchedulerOptions(depth=1, max_iterations=max_iterations),
        threads=1,
        device=DEVICE,
    )
    engine, _ = build_engine(options, {SERVICE: folder}, wrap=wrap)
    made[0].stops = stops
    batch = OfflineBatch(engine)
    for number, sampling in enumerate(params):
        batch.add("", SERVICE, make_prompt(9 + 5 * number, seed=number), sampling, Letters())
    completions = [completion for output in run_batch(engine, batch) for completion in output.outputs]
    stats = engine.stats()
    engine.close()
    return completions, made[0], stats


def same(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    """Equal but for times and the rounding of other batches."""

    def apart(completion: Completion) -> Completion:
        return replace(completion, logprobs=None, record=None)

    assert list(map(apart, left)) == list(map(apart, right))
    for one, other in zip(left, right, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, its in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token == its.token
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in its.top]
        assert one.record is not None
        assert other.record is not None
        assert one.record.output_tokens == other.record.output_tokens == len(one.tokens)


PLAIN = (
    SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=OUTPUT - 7, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=OUTPUT, seed=3, n=2, logprobs=0),
    SamplingParams(temperature=0.9, max_tokens=OUTPUT, seed=4, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, max_tokens=OUTPUT, seed=5, top_k=20, presence_penalty=1.0),
    SamplingParams(temperature=0.0, max_tokens=OUTPUT, frequency_penalty=1.5, logprobs=1, min_tokens=20),
)


def with_ends(folder: Path) -> list[SamplingParams]:
    """The same with stop strings and stop tokens that come within the outputs."""
    completions, _, _ = answer(folder, PLAIN, 1)
    first = {params: completions[at + (at > 2)] for at, params in enumerate(PLAIN)}
    ending: list[SamplingParams] = []
    for at, (params, completion) in enumerate(first.items()):
        cut = 5 + 2 * at
        ending += [
            replace(params, stop=(completion.text[cut : cut + 2],)),
            replace(params, stop=(completion.text[cut], "not said"), min_tokens=cut - 2),
            replace(params, stop_token_ids=(completion.tokens[cut],)),
            replace(params, stop_token_ids=(completion.tokens[cut],), min_tokens=cut + 3),
        ]
    return ending


@pytest.mark.parametrize("max_iterations", [4, 7])
def test_outputs_are_the_same(folder: Path, max_iterations: int) -> None:
    single, before, counted_before = answer(folder, PLAIN, 1)
    several, after, counted_after = answer(folder, PLAIN, max_iterations)
    same(single, several)
    assert {plan.iterations for plan in before.plans} == {1}
    assert max(plan.iterations for plan in after.plans) == max_iterations
    assert len(after.plans) < len(before.plans) / 2
    assert counted_before.steps.count == counted_after.steps.count
    before_service, after_service = (
        replace(counted.services[SERVICE], observed=None) for counted in (counted_before, counted_after)
    )
    assert before_service == after_service


@pytest.mark.parametrize("max_iterations", [4, 7])
def test_outputs_with_ends_of_all_kinds_are_the_same(folder: Path, max_iterations: int) -> None:
    params = with_ends(folder)
    single, _, _ = answer(folder, params, 1)
    several, watched, _ = answer(folder, params, max_iterations)
    same(single, several)
    assert max(plan.iterations for plan in watched.plans) > 1
    reasons = {(completion.finish_reason, type(completion.stop_reason)) for completion in several}
    assert reasons >= {(FinishReason.STOP, str), (FinishReason.STOP, int)}


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_the_same_whenever_plans_are_interrupted(folder: Path, seed: int) -> None:
    draw = Random(seed)
    single, _, counted_before = answer(folder, PLAIN, 1)
    several, _, counted_after = answer(folder, PLAIN, 8, stops=lambda: draw.random() < 0.3)
    same(single, several)
    assert counted_before.steps.count == counted_after.steps.count


def test_outputs_are_the_same_where_memory_is_short(folder: Path) -> None:
    """Plans of several iterations take free blocks; where there are none, single steps preempt."""
    single, _, _ = answer(folder, PLAIN, 1, memory_bytes=80 << 10)
    several, watched, counted = answer(folder, PLAIN, 4, memory_bytes=80 << 10)
    same(single, several)
    assert counted.services[SERVICE].preemptions > 0
    assert max(plan.iterations for plan in watched.plans) > 1
    for plan in watched.plans:
        if plan.iterations > 1:
            assert not any((plan.swap_out_copies, plan.copies, plan.moved, plan.joined))
