"""Executors of which some forward passes fail; imported by engine processes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from checked_engine import CheckedEngine

from shoal.core import StepPlan
from shoal.engine import Engine, EngineInfo, EngineOptions, build_engine
from shoal.execute.sequences import RunningSequence
from shoal.execute.torch_executor import PreparedStep, TorchExecutor

POISON = 7
"""A prompt that begins with this token fails in an engine of ``build_failing_engine``."""

Fails = Callable[[StepPlan, Sequence[RunningSequence]], bool]


def sabotage(executor: TorchExecutor, fails: Fails) -> None:
    """Let the forward pass of some plans run out of memory, after it has written its KV."""
    forward = executor._forward

    def failing(plan: StepPlan, step: PreparedStep) -> torch.Tensor:
        logits = forward(plan, step)
        if fails(plan, [executor._sequences[seq_id] for seq_id in plan.seq_ids]):
            raise torch.OutOfMemoryError("out of memory, tried to allocate 20 GiB")
        return logits

    executor._forward = failing  # type: ignore[method-assign]


def build_failing_engine(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[Engine, EngineInfo]:
    engine, info = build_engine(options, folders, progress=progress)
    sabotage(engine._executor, lambda plan, rows: any(row.tokens[0] == POISON for row in rows))
    engine.__class__ = CheckedEngine
    return engine, info
