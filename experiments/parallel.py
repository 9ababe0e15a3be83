"""Runs the points of an experiment in parallel processes."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from experiments.result import Effort
from shoal.simulate.parallel import Workers

Point = TypeVar("Point")
Found = TypeVar("Found")


def map_points(
    effort: Effort,
    what: str,
    function: Callable[[Point], Found],
    points: Sequence[Point],
    *,
    heaviest_first: Callable[[Point], float] | None = None,
) -> list[Found]:
    """``function`` of every point, in their order; reports progress as points end.

    function, points and heaviest_first as in ``Workers.at_each``. A quick effort stays in this process, since
    starting workers takes seconds.
    """
    processes = 1 if effort.quick else min(os.cpu_count() or 1, len(points)) or 1
    report = effort.progress or (lambda what, done, total: None)
    with Workers(function, processes) as workers:
        return workers.at_each(
            _apply, points, lambda done, total: report(what, done, total), heaviest_first=heaviest_first
        )


def _apply(function: Callable[[Point], Found], point: Point) -> Found:
    return function(point)
