"""The engine of the chaos benchmark: the real one, whose executor fails for requests that say so."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.core import StepPlan, StepResult
from shoal.engine import Engine, EngineInfo, EngineOptions, build_engine
from shoal.execute.protocol import Executor, Interrupted, never

POISON = (11, 12, 13, 14)
"""A prompt that begins with these tokens kills every engine that computes it."""

FAILS_ONCE = (21, 22, 23, 24)
"""The same, but a prompt with these and another token after them kills only the first engine."""

MARKS = "CHAOS_MARKS"
"""Environment variable with the folder that remembers which prompts have killed."""


class FailingExecutor:
    """Passes plans on, and raises where one has a prompt that is to kill."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """As the executor, unless the plan is to fail."""
        for joined in plan.joined:
            if _kills(joined.tokens):
                raise RuntimeError("the executor was told to fail")
        self._inner.submit(plan, interrupted)

    def collect(self) -> StepResult:
        """As the executor."""
        return self._inner.collect()

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """As the executor."""
        return self._inner.ready(seq_ids)

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """As the executor."""
        return self._inner.read_blocks(service, blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """As the executor."""
        self._inner.write_blocks(service, blocks, content)

    def close(self) -> None:
        """As the executor."""
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
    """As ``build_engine``."""
    return build_engine(options, folders, progress=progress, wrap=FailingExecutor)
