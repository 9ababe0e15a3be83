"""Forward passes that fail: what the executor says of them, and that it can go on."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    GREEDY,
    HandScheduler,
    make_model,
    make_prompt,
    reference_tokens,
    tiny_config,
    with_forward,
)

from shoal.core import NewSequence, StepPlan
from shoal.execute import torch_executor
from shoal.execute.protocol import StepFailed
from shoal.execute.torch_executor import PreparedStep, TorchExecutor

PROMPT = make_prompt(9, seed=1)
OUT_OF_MEMORY = torch.OutOfMemoryError("tried to allocate 20 GiB")
PHASES = ("prepare", "forward", "sample")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("failures") / "llama", tiny_config("llama"))


@pytest.fixture(params=[1, 2])
def hand(folder: Path, request: pytest.FixtureRequest) -> HandScheduler:
    return HandScheduler({"a": folder}, depth=request.param)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return fail


def break_phase(
    hand: HandScheduler, monkeypatch: pytest.MonkeyPatch, phase: str, error: BaseException = OUT_OF_MEMORY
) -> None:
    if phase == "forward":
        services = hand.models.services
        monkeypatch.setitem(services, "a", with_forward(services["a"], raising(error)))
    elif phase == "prepare":
        monkeypatch.setattr(hand.executor, "_prepare", raising(error))
    else:
        monkeypatch.setattr(torch_executor, "sample", raising(error))
        if type(hand.executor) is not TorchExecutor:
            monkeypatch.setattr("shoal.execute.gpu.executor.choose", raising(error))


def start(hand: HandScheduler, number: int, left: tuple[int, ...] = ()) -> StepPlan:
    """A plan that computes the prompt in a new sequence."""
    joined = NewSequence(number, PROMPT, len(PROMPT), 0, hand.blocks("a", len(PROMPT) + 8), GREEDY, seed=0)
    return StepPlan(
        number=number,
        service="a",
        seq_ids=(number,),
        new_tokens=(len(PROMPT),),
        sampled=(0,),
        joined=(joined,),
        left=left,
    )


def decode(number: int) -> StepPlan:
    return StepPlan(number=99, service="a", seq_ids=(number,), new_tokens=(1,), sampled=(0,))


def run(hand: HandScheduler, plan: StepPlan) -> int:
    hand.executor.submit(plan)
    return hand.executor.collect().tokens[0][0]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, ValueError("the model does not like 9")], ids=repr)
def test_the_request_of_a_failed_step_can_be_computed_again(
    phase: str, error: Exception, hand: HandScheduler, folder: Path
) -> None:
    with pytest.MonkeyPatch.context() as broken:
        break_phase(hand, broken, phase, error)
        with pytest.raises(StepFailed) as raised:
            run(hand, start(hand, 0))
        assert str(raised.value) == f"{type(error).__name__}: {error}"
    tokens = [run(hand, start(hand, 1, left=(0,))), *[run(hand, decode(1)) for _ in range(3)]]
    assert tokens == reference_tokens(folder, PROMPT, 4)


def test_of_plans_behind_a_failed_one_only_changes_are_applied(folder: Path) -> None:
    hand = HandScheduler({"a": folder}, depth=2)
    with pytest.MonkeyPatch.context() as broken:
        break_phase(hand, broken, "forward")
        hand.executor.submit(start(hand, 0))
        hand.executor.submit(start(hand, 1))
        with pytest.raises(StepFailed, match="20 GiB"):
            hand.executor.collect()
    # Submitted before all of them were collected, this one may build on them, too.
    hand.executor.submit(StepPlan(number=2, service="a", seq_ids=(), new_tokens=(), sampled=()))
    for _ in range(2):
        with pytest.raises(StepFailed, match="the step before it"):
            hand.executor.collect()
    # The second sequence has joined, and is still to be computed.
    prompt = StepPlan(number=3, service="a", seq_ids=(1,), new_tokens=(len(PROMPT),), sampled=(0,), left=(0,))
    assert [run(hand, prompt), run(hand, decode(1))] == reference_tokens(folder, PROMPT, 2)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=repr,
)
def test_unrecoverable_errors_are_raised_unchanged(
    error: Exception, hand: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_phase(hand, monkeypatch, "forward", error)
    with pytest.raises(type(error), match="error:"):
        run(hand, start(hand, 0))


def test_errors_of_copies_and_of_the_batch_are_raised_unchanged(hand: HandScheduler) -> None:
    hand.executor.store.zero = raising(OUT_OF_MEMORY)  # type: ignore[method-assign]
    plan = StepPlan(number=0, service="a", seq_ids=(), new_tokens=(), sampled=(), zero=(0,))
    hand.executor.submit(plan)
    with pytest.raises(torch.OutOfMemoryError):
        hand.executor.collect()
    unknown = StepPlan(number=1, service="a", seq_ids=(), new_tokens=(), sampled=(), grown=((5, (1,)),))
    hand.executor.submit(unknown)
    with pytest.raises(KeyError):
        hand.executor.collect()


def test_an_interrupt_is_not_a_step_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = HandScheduler({"a": folder})
    break_phase(hand, monkeypatch, "sample", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hand.executor.submit(start(hand, 0))


def test_a_failure_keeps_no_tensors(hand: HandScheduler) -> None:
    """They are freed before the next attempt, also while the error is referenced."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    forward = hand.executor._forward

    def failing(plan: StepPlan, step: PreparedStep) -> torch.Tensor:
        logits = forward(plan, step)
        tensors.extend([weakref.ref(logits), weakref.ref(step.arguments().input_ids)])
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    hand.executor._forward = failing  # type: ignore[method-assign]
    gc.disable()
    try:
        hand.executor.submit(start(hand, 0))
        with pytest.raises(StepFailed) as raised:
            hand.executor.collect()
        assert raised.value.__context__ is None
        assert [tensor() for tensor in tensors] == [None, None]
    finally:
        gc.enable()
