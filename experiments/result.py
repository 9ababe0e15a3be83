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
    """One point of an experiment. Times are seconds, fractions 0 to 1."""

    config: Mapping[str, Value]
    """What was run."""
    metrics: Mapping[str, Value]
    """What we measured."""
    paper: Mapping[str, Value] | None = None
    """What the paper prints of the same metrics, under the same names, a range as ``between`` writes it; None
    where it prints nothing."""

    def to_json(self) -> dict[str, Any]:
        """As plain values; NaN becomes None, because JSON has no NaN."""
        return {
            "config": _plain(self.config),
            "metrics": _plain(self.metrics),
            "paper": None if self.paper is None else _plain(self.paper),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One experiment."""

    name: str
    """What the command line calls it."""
    paper: str
    """Which paper, and where in it."""
    assumptions: Sequence[str]
    """Everything that the paper does not print and the figures depend on; lines on what differs begin with
    "Differs:"."""
    rows: Sequence[Row]
    """Its points."""
    panels: Sequence[Sequence[Panel]] = ()
    """Rows of a picture."""

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
    """How much is computed."""

    quick: bool = False
    """For a look, with less of everything; its figures are rough."""
    progress: Callable[[str, int, int | None], None] | None = None
    """Called with what is being done, how many of its parts are done, and of how many."""

    def choose(self, full: T, quick: T) -> T:
        """One of two sizes."""
        return quick if self.quick else full

    def each(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items; progress is reported before each and at the end."""
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
