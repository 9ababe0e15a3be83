"""Parallel evaluation of a function (such as a simulation) at many points in worker processes."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shoal.engine.process.child_signals import interrupts_held_back
from shoal.models.child_process import end_with_parent

Shared = TypeVar("Shared")
Point = TypeVar("Point")
Found = TypeVar("Found")
Progress = Callable[[int, int], None]
"""Called with the number of finished points, and of all."""


class Workers(Generic[Shared]):
    """Worker processes that compute a function of a shared value at many points; a context manager.

    shared: sent once to each process. processes: their limit; None: one per core; 1: everything is computed
    in this process. They start with the first points, and end with the block, also if this process is killed.
    """

    def __init__(self, shared: Shared, processes: int | None = None) -> None:
        self._shared = shared
        self._processes = processes or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._pipe: tuple[Connection, Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, without waiting for unfinished points."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for end in self._pipe or ():
            end.close()
        self._pool = self._pipe = None

    def at_each(
        self,
        function: Callable[[Shared, Point], Found],
        points: Sequence[Point],
        progress: Progress | None = None,
        *,
        heaviest_first: Callable[[Point], float] | None = None,
    ) -> list[Found]:
        """Results of ``function`` for the shared value and each point, in order.

        function, points and results must be picklable. heaviest_first: estimated cost of a point, in any
        unit; the most expensive points start first, so that no core is idle at the end.
        """
        progress = progress or (lambda done, total: None)
        progress(0, len(points))
        if self._processes < 2 or (self._pool is None and len(points) < 2):
            return self._compute_here(function, points, progress)
        order = list(range(len(points)))
        if heaviest_first is not None:
            order.sort(key=lambda at: -heaviest_first(points[at]))
        resource_tracker.ensure_running()  # its own start unblocks interrupts
        with interrupts_held_back():
            pool = self._pool = self._pool or self._start()
            futures = {pool.submit(_compute, function, points[at]): at for at in order}
        found: dict[int, Found] = {}
        for done, future in enumerate(as_completed(futures), start=1):
            found[futures[future]] = future.result()
            progress(done, len(points))
        return [found[at] for at in range(len(points))]

    def _compute_here(
        self, function: Callable[[Shared, Point], Found], points: Sequence[Point], progress: Progress
    ) -> list[Found]:
        found = []
        for point in points:
            found.append(function(self._shared, point))
            progress(len(found), len(points))
        return found

    def _start(self) -> ProcessPoolExecutor:
        # Not forked: the progress bar has a thread, and a fork may copy its locks as they are.
        context = multiprocessing.get_context("spawn")
        self._pipe = theirs, _ = context.Pipe(duplex=False)
        return ProcessPoolExecutor(
            self._processes, context, initializer=_prepare, initargs=(theirs, self._shared)
        )


_HELD: list[Any] = []
"""In a worker: its lifeline, kept open, and the shared value."""


def _prepare(lifeline: Connection, shared: Any) -> None:
    """Initialize a worker, which ends with its parent."""
    end_with_parent(lifeline.fileno())
    _HELD[:] = lifeline, shared


def _compute(function: Callable[[Any, Any], Any], point: Any) -> Any:
    return function(_HELD[1], point)
