"""Simulations side by side, each in a process of its own where there are several cores."""

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
Tell = Callable[[int, int], None]
"""Told how many points are done, and of how many."""


class Workers(Generic[Shared]):
    """Processes that all have the same value, and compute a function of it at points.

    shared: what all points need; it is sent once to each process. processes: at most so many; None: one for
    each core. With one, everything is computed here. They start with the first points, and end at the end of
    the block, also where it ends with an error or this process is killed.
    """

    def __init__(self, shared: Shared, processes: int | None = None) -> None:
        self._shared = shared
        self._processes = processes or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._pipe: tuple[Connection, Connection] | None = None

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, also those that still work on a point."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for end in self._pipe or ():
            end.close()
        self._pool = self._pipe = None

    def at_each(
        self,
        function: Callable[[Shared, Point], Found],
        points: Sequence[Point],
        tell: Tell | None = None,
        *,
        heaviest_first: Callable[[Point], float] | None = None,
    ) -> list[Found]:
        """``function`` of the shared value and every point, in their order.

        function: of a module, and its points and results plain values, so that they can be sent.
        heaviest_first: about how long a point takes, in any unit; the longest begin first, so that no core is
        idle at the end.
        """
        tell = tell or (lambda done, total: None)
        tell(0, len(points))
        if self._processes < 2 or (self._pool is None and len(points) < 2):
            return self._here(function, points, tell)
        order = list(range(len(points)))
        if heaviest_first is not None:
            order.sort(key=lambda at: -heaviest_first(points[at]))
        resource_tracker.ensure_running()  # it lets interrupts through again when it starts
        with interrupts_held_back():
            pool = self._pool = self._pool or self._start()
            futures = {pool.submit(_compute, function, points[at]): at for at in order}
        found: dict[int, Found] = {}
        for done, future in enumerate(as_completed(futures), start=1):
            found[futures[future]] = future.result()
            tell(done, len(points))
        return [found[at] for at in range(len(points))]

    def _here(
        self, function: Callable[[Shared, Point], Found], points: Sequence[Point], tell: Tell
    ) -> list[Found]:
        found = []
        for point in points:
            found.append(function(self._shared, point))
            tell(len(found), len(points))
        return found

    def _start(self) -> ProcessPoolExecutor:
        # Not forked: the progress bar has a thread, and a fork may copy its locks as they are.
        context = multiprocessing.get_context("spawn")
        self._pipe = theirs, _ = context.Pipe(duplex=False)
        return ProcessPoolExecutor(
            self._processes, context, initializer=_prepare, initargs=(theirs, self._shared)
        )


_HELD: list[Any] = []
"""In a worker: its lifeline, kept open for as long as the process lives, and the shared value."""


def _prepare(lifeline: Connection, shared: Any) -> None:
    """Once in each process: it ends when its parent no longer needs it, or was killed."""
    end_with_parent(lifeline.fileno())
    _HELD[:] = lifeline, shared


def _compute(function: Callable[[Any, Any], Any], point: Any) -> Any:
    return function(_HELD[1], point)
