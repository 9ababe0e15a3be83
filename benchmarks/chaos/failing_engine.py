"""Engine of the chaos test: a real one whose executor fails for marked prompts."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.core import Arrival, StepPlan, StepResult
from shoal.engine import Engine, EngineInfo, EngineOptions, build_engine
from shoal.execute.protocol import Executor, Interrupted, never

POISON = (11, 12, 13, 14)
"""A prompt that begins with these tokens kills every engine that computes it."""

FAILS_ONCE = (21, 22, 23, 24)
"""Like ``POISON``, but each token after these kills only one engine."""

MARKS = "CHAOS_MARKS"
"""Environment variable with the folder of marks: prompts that have killed an engine."""


class FailingExecutor:
    """Passes plans on, and raises for marked prompts."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        for joined in plan.joined:
            if _kills(joined.tokens):
                raise RuntimeError("the executor fails for this prompt")
        self._inner.submit(plan, interrupted)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        return self._inner.ready(seq_ids)

    def arrivals(self) -> Sequence[Arrival]:
        return self._inner.arrivals()

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        return self._inner.read_blocks(service, blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        self._inner.write_blocks(service, blocks, content)

    def close(self) -> None:
        self._inner.close()


def _kills(tokens: Sequence[int]) -> bool:
    head = tuple(tokens[:4])
    if head == POISON:
        return True
    if head != FAILS_ONCE:
        return False
    try:
        (Path(os.environ[MARKS]) / str(tokens[4])).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def build_chaos_engine(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[Engine, EngineInfo]:
    """Like ``build_engine``."""
    return build_engine(options, folders, progress=progress, wrap=FailingExecutor)
