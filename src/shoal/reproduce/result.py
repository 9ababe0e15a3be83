"""What a reproduction finds, and how hard it tries."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.measure import Panel

T = TypeVar("T")
Value = str | int | float | bool | None
"""What a cell may hold: plain values, NaN for what was not measured."""

LEAST, MOST = "_least", "_most"
"""Endings of a metric's name under which a paper's range for it is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of an experiment. Times are seconds, fractions 0 to 1.

    config: what was run. metrics: what we measured. paper: what the paper prints of the same metrics, under
    the same names, a range as ``between`` writes it; None where it prints nothing.
    """

    config: Mapping[str, Value]
    metrics: Mapping[str, Value]
    paper: Mapping[str, Value] | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values; NaN becomes None, because JSON has no NaN."""
        return {
            "config": _plain(self.config),
            "metrics": _plain(self.metrics),
            "paper": None if self.paper is None else _plain(self.paper),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One experiment.

    paper: which one, and where in it. assumptions: everything that the paper does not print and the figures
    depend on; lines on what differs begin with "Differs:". panels: rows of a picture.
    """

    name: str
    paper: str
    assumptions: Sequence[str]
    rows: Sequence[Row]
    panels: Sequence[Sequence[Panel]] = ()

    def to_json(self) -> dict[str, Any]:
        """The schema that all reproductions share."""
        return {
            "name": self.name,
            "paper": self.paper,
            "assumptions": list(self.assumptions),
            "rows": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is computed. quick: for a look, with less of everything; its figures are rough.

    progress: told what is being done, how many of its parts are done, and of how many.
    """

    quick: bool = False
    progress: Callable[[str, int, int | None], None] | None = None

    def choose(self, full: T, quick: T) -> T:
        """One of two sizes."""
        return quick if self.quick else full

    def each(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items, with progress told before each and at the end."""
        for done, item in enumerate(items):
            self._tell(what, done, len(items))
            yield item
        self._tell(what, len(items), len(items))

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


FULL = Effort()
"""Everything, silently."""


def between(metric: str, least: float, most: float) -> dict[str, Value]:
    """A paper's range for a metric, as it is kept in ``Row.paper``."""
    return {metric + LEAST: least, metric + MOST: most}


def _plain(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}
