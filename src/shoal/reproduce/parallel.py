"""Points of an experiment, each in a process of its own where there are several cores."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import TypeVar

from shoal.engine.children import interrupts_held_back
from shoal.models.child import end_with_parent
from shoal.reproduce.result import Effort

Point = TypeVar("Point")
Found = TypeVar("Found")


def at_each(
    effort: Effort,
    what: str,
    function: Callable[[Point], Found],
    points: Sequence[Point],
    *,
    heaviest_first: Callable[[Point], float] | None = None,
) -> list[Found]:
    """``function`` of every point, in their order; progress is reported as points are done.

    function: of a module, and its points and results plain values, so that they can be sent. heaviest_first:
    about how long a point takes, in any unit; the longest begin first, so that no core is idle at the end.
    A quick effort stays in this process, since starting others takes seconds.
    """
    cores = min(os.cpu_count() or 1, len(points))
    if effort.quick or cores < 2:
        return [function(point) for point in effort.each(what, points)]
    order = list(range(len(points)))
    if heaviest_first is not None:
        order.sort(key=lambda at: -heaviest_first(points[at]))
    tell = effort.progress or (lambda what, done, total: None)
    tell(what, 0, len(points))
    # Not forked: the progress bar has a thread, and a fork may copy its locks as they are.
    context = multiprocessing.get_context("spawn")
    theirs, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(cores, context, initializer=_prepare, initargs=(theirs,))
    try:
        with interrupts_held_back():
            futures = {pool.submit(function, points[at]): at for at in order}
        found: dict[int, Found] = {}
        for done, future in enumerate(as_completed(futures), start=1):
            found[futures[future]] = future.result()
            tell(what, done, len(points))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        lifeline.close()  # ends processes that still work on a point
        theirs.close()
    return [found[at] for at in range(len(points))]


def _prepare(lifeline: Connection) -> None:
    """Once in each process: it ends when its parent no longer needs it, or was killed."""
    end_with_parent(lifeline.fileno())
    _LIFELINES.append(lifeline)


_LIFELINES: list[Connection] = []
"""Kept open for as long as the process lives."""
