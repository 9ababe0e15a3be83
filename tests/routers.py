"""Routers whose engines are processes on this machine, for tests."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.cluster.backends.make import make_backend
from shoal.cluster.options import ClusterOptions, EnginePlan, RestartOptions
from shoal.cluster.router.action_runner import OnDecision
from shoal.cluster.router.router import Router
from shoal.engine import EngineOptions

QUICK = ClusterOptions(restart=RestartOptions(first_s=0.05, max_s=0.05))


def make_router(
    options: EngineOptions,
    folders: Mapping[str, Path],
    tokenizers: Mapping[str, Any],
    builder: str,
    *,
    engines: int = 1,
    cluster: ClusterOptions = QUICK,
    on_decision: OnDecision | None = None,
) -> Router:
    """A router of equal engines, called 0, 1, ..., not started; needs a running loop."""
    return Router(
        [EnginePlan(name=str(number), options=options) for number in range(engines)],
        folders,
        tokenizers,
        make_backend(cluster),
        cluster,
        max_queue=options.max_queue,
        builder=builder,
        on_decision=on_decision,
    )


async def start_router(
    options: EngineOptions,
    folders: Mapping[str, Path],
    tokenizers: Mapping[str, Any],
    builder: str,
    *,
    progress: Callable[[str], None] | None = None,
    **further: Any,
) -> Router:
    """The same, started."""
    router = make_router(options, folders, tokenizers, builder, **further)
    await router.run(progress)
    return router
