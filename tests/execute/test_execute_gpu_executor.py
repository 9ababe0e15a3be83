"""A GpuExecutor on the CPU, with plans made by hand: what it keeps, and what is left of errors."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from execute_builders import (
    GREEDY,
    HandScheduler,
    make_model,
    make_prompt,
    needs_triton,
    reference_tokens,
    tiny_config,
)

from at_hand import on_cpu
from shoal.core import NewSequence, SamplingParams, StepPlan
from shoal.execute import executors
from shoal.execute.attention.torch_backends import BatchedAttention
from shoal.execute.protocol import StepFailed
from shoal.execute.torch_executor import PreparedStep

if TYPE_CHECKING:
    from gpu_builders import GpuOnCpu

pytestmark = [needs_triton, on_cpu]

PROMPT = make_prompt(9, seed=1)
LOGPROBS = SamplingParams(temperature=0.0, logprobs=1, ignore_eos=True)
TOP_P = SamplingParams(temperature=1.0, top_p=0.999, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpu") / "llama", tiny_config("llama"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> "GpuOnCpu":
    from gpu_builders import GpuOnCpu

    made = GpuOnCpu(monkeypatch)
    monkeypatch.setattr("execute_builders.make_executor", executors.make_executor)
    return made


def start(hand: HandScheduler, number: int, sampling: SamplingParams = GREEDY, **others: Any) -> StepPlan:
    """A plan that computes the prompt in a new sequence."""
    blocks = hand.blocks("a", len(PROMPT) + 8)
    joined = NewSequence(number, PROMPT, len(PROMPT), 0, blocks, sampling, seed=0)
    return StepPlan(
        number=number,
        service="a",
        seq_ids=(number,),
        new_tokens=(len(PROMPT),),
        sampled=(0,),
        joined=(joined,),
        **others,
    )


def decode(*numbers: int, **others: Any) -> StepPlan:
    return StepPlan(
        number=9,
        service="a",
        seq_ids=numbers,
        new_tokens=(1,) * len(numbers),
        sampled=tuple(range(len(numbers))),
        **others,
    )


@pytest.mark.parametrize("slots_are_read", [True, False])
def test_changes_of_tables_are_not_kept(slots_are_read: bool, folder: Path, gpu: "GpuOnCpu") -> None:
    """The device gets them, or nothing reads them there."""
    hand = HandScheduler({"a": folder})
    if not slots_are_read:
        without_slots(hand)
    run_prompts(hand)
    assert not gpu.executors[0].slot_steps._changes


def test_changes_of_tables_are_not_kept_for_a_service_without_traffic(folder: Path, gpu: "GpuOnCpu") -> None:
    hand = HandScheduler({"a": folder, "idle": folder})
    without_slots(hand)
    run_prompts(hand)
    assert not gpu.executors[0].slot_steps._changes


def without_slots(hand: HandScheduler) -> None:
    hand.models.services["a"] = replace(hand.models.services["a"], backend=BatchedAttention)


def run_prompts(hand: HandScheduler) -> None:
    for number in range(5):
        hand.executor.submit(start(hand, number, left=(number - 1,) if number else ()))
        hand.executor.collect()


def test_out_of_memory_while_tokens_are_chosen_again_fails_the_step(
    folder: Path, gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan behind it began with a token that was none, so it fails, too; its other rows go on."""
    hand = HandScheduler({"a": folder})
    hand.executor.submit(start(hand, 1))
    first = hand.executor.collect().tokens[0]
    with monkeypatch.context() as broken:
        broken.setattr("shoal.execute.sampling.choose.CANDIDATES", 2)
        broken.setattr("shoal.execute.gpu.executor.choose_incomplete", fail)
        hand.executor.submit(start(hand, 0, TOP_P))
        hand.executor.submit(decode(0, 1))
        with pytest.raises(StepFailed, match="20 GiB"):
            hand.executor.collect()
        with pytest.raises(StepFailed):
            hand.executor.collect()
    hand.executor.submit(decode(1, left=(0,)))
    hand.executor.submit(decode(1))
    tokens = [*first, *hand.executor.collect().tokens[0], *hand.executor.collect().tokens[0]]
    assert tokens == reference_tokens(folder, PROMPT, 3)


def test_a_plan_with_the_host_fails_if_those_before_it_do(
    folder: Path, gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = HandScheduler({"a": folder})
    with monkeypatch.context() as broken:
        broken.setattr("shoal.execute.sampling.choose.CANDIDATES", 2)
        broken.setattr("shoal.execute.gpu.executor.choose_incomplete", fail)
        hand.executor.submit(start(hand, 0, TOP_P))
        hand.executor.submit(start(hand, 1, LOGPROBS))
        for error in ("20 GiB", "the step before it"):
            with pytest.raises(StepFailed, match=error):
                hand.executor.collect()


def fail(*arguments: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 20 GiB")


def test_time_of_a_step_begins_when_those_before_it_have_ended(
    folder: Path, gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its time would be counted twice."""
    hand = HandScheduler({"a": folder})
    ticks = itertools.count()
    now_ns = [0]

    def waited() -> None:
        now_ns[0] += 1_000_000

    monkeypatch.setattr(gpu.queue, "_waited", waited)
    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns[0] + next(ticks))
    hand.executor.submit(start(hand, 0))
    hand.executor.submit(start(hand, 1, LOGPROBS))
    first, second = hand.executor.collect(), hand.executor.collect()
    assert now_ns[0] == 1_000_000
    assert first.duration_ns == 1000
    assert second.duration_ns < 1_000_000


def test_a_row_that_is_late_may_be_in_no_plan_behind(
    folder: Path, gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.execute.sampling.choose.CANDIDATES", 2)
    hand = HandScheduler({"a": folder})
    hand.executor.submit(start(hand, 0, TOP_P))
    hand.executor.submit(start(hand, 1))
    late, behind = (hand.executor.collect().tokens[0] for _ in range(2))
    assert behind == reference_tokens(folder, PROMPT, 1)
    assert late[0] >= 0


@pytest.mark.parametrize("collected", [True, False])
def test_tokens_do_not_wait_for_a_plan_with_the_host(
    folder: Path, gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch, collected: bool
) -> None:
    """It is computed when it is collected, or with the plan behind it."""
    hand = HandScheduler({"a": folder})
    forward, computed = hand.executor._forward, []

    def noted(plan: StepPlan, step: PreparedStep) -> torch.Tensor:
        computed.append(plan.seq_ids[0])
        return forward(plan, step)

    monkeypatch.setattr(hand.executor, "_forward", noted)
    hand.executor.submit(start(hand, 0))
    hand.executor.submit(start(hand, 1, LOGPROBS))
    first = hand.executor.collect().tokens[0]
    assert computed == [0]
    if not collected:
        hand.executor.submit(decode(0))
        assert computed == [0, 1, 0]
    assert hand.executor.collect().tokens[0] == first == reference_tokens(folder, PROMPT, 1)
    assert computed[:2] == [0, 1]


def test_warm_graphs_are_for_all_rows_to_come(folder: Path, gpu: "GpuOnCpu") -> None:
    """A step of so many sequences needs no larger tables, for which all graphs would be recorded again."""
    hand = HandScheduler({"a": folder})
    hand.executor.warm_up(600, 2048)
    [executor] = gpu.executors
    tables = executor.slot_steps._state.tables
    assert len(tables) >= 600
    [graphs] = executor.slot_steps.graphs.values()
    run_prompts(hand)
    assert executor.slot_steps._state.tables is tables
    assert list(executor.slot_steps.graphs.values()) == [graphs]
