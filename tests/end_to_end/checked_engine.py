"""An engine that checks its pool's books whenever it is asked for stats; imported by engine processes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.engine import Engine, EngineInfo, EngineOptions, EngineStats, build_engine


class CheckedEngine(Engine):
    def stats(self) -> EngineStats:
        self._pool.check_integrity()
        return super().stats()


def build_checked_engine(
    options: EngineOptions,
    folders: Mapping[str, Path],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[Engine, EngineInfo]:
    engine, info = build_engine(options, folders, progress=progress)
    engine.__class__ = CheckedEngine
    return engine, info
