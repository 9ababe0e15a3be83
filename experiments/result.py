"""Results of experiments (rows of metrics, with the paper's), and how much effort a run takes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.measure import Panel

T = TypeVar("T")
Value = str | int | float | bool | None
"""A table cell; NaN means not measured."""

LEAST, MOST = "_least", "_most"
"""Suffixes of a metric's name, for a range that a paper prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of an experiment. Times are seconds, fractions 0 to 1."""

    config: Mapping[str, Value]
    metrics: Mapping[str, Value]
    """Our measurements."""
    paper: Mapping[str, Value] | None = None
    """The paper's figures under the same names, ranges as in ``between``; None if it prints none."""

    def to_json(self) -> dict[str, Any]:
        """NaN becomes None, because JSON has no NaN."""
        return {
            "config": _plain(self.config),
            "metrics": _plain(self.metrics),
            "paper": None if self.paper is None else _plain(self.paper),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one experiment."""

    name: str
    paper: str
    """The paper, and its tables or figures."""
    assumptions: Sequence[str]
    """What the figures depend on and the paper does not print; lines on deviating results begin with
    "Differs:"."""
    rows: Sequence[Row]
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
    """Smaller runs with rough figures."""
    progress: Callable[[str, int, int | None], None] | None = None
    """Called with a label, the number of points done, and their total (None: unknown)."""

    def choose(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def each(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items; reports progress before each and at the end."""
        for done, item in enumerate(items):
            self._report(what, done, len(items))
            yield item
        self._report(what, len(items), len(items))

    def _report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


FULL = Effort()
"""Full size, without progress."""


def between(metric: str, least: float, most: float) -> dict[str, Value]:
    """A paper's range for a metric, as in ``Row.paper``."""
    return {metric + LEAST: least, metric + MOST: most}


def _plain(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}
