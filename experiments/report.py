"""Terminal tables of results: our figures, and the paper's below them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import Reproduction, Result, Row
from experiments.result import LEAST, MOST, Value

_GAP = 2
"""Blanks between two columns."""


def list_table(reproductions: Sequence[Reproduction]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("paper")
    table.add_column("measures")
    for reproduction in reproductions:
        table.add_row(reproduction.name, reproduction.paper, reproduction.measures)
    return table


def print_result(console: Console, result: Result, quick: bool) -> None:
    """Print our figures with the paper's below them, then the assumptions."""
    console.print(Text(f"{result.name}: {result.paper}", style="bold"))
    if quick:
        console.print(Text("quick: smaller than the real one, figures are rough", style="yellow"))
    for table in result_tables(result, console.width):
        console.print(table)
    console.print(Text("Assumptions", style="bold"))
    for line in result.assumptions:
        console.print(Text("- " + line))


def result_tables(result: Result, width: int) -> list[Table]:
    """A line for each row, and below it, dimmed, the paper's figures for the same metrics.

    width: of the terminal. Metrics that do not fit go into further tables.
    """
    configs = [_config_column(result.rows, name) for name in _names(row.config for row in result.rows)]
    if configs and any(row.paper is not None for row in result.rows):
        configs[0] = configs[0].labelled("paper")
    metrics = [_metric_column(result.rows, name) for name in _names(row.metrics for row in result.rows)]
    metrics_width = width - sum(column.width for column in configs)
    return [_table(result.rows, configs, part) for part in _split(metrics, metrics_width)]


@dataclass(frozen=True)
class _Column:
    heading: str
    ours: Sequence[str]
    """Cells of our rows."""
    papers: Sequence[str]
    """Cells of the paper's rows below them."""
    justify: Literal["left", "right"]

    @property
    def width(self) -> int:
        """Characters, with the gap after it; the heading may break between words."""
        return _GAP + max(map(len, (*self.heading.split(), *self.ours, *self.papers)), default=0)

    def labelled(self, label: str) -> "_Column":
        """With ``label`` in the paper's rows."""
        return _Column(self.heading, self.ours, [label] * len(self.papers), self.justify)


def _names(values: Iterable[Mapping[str, Value]]) -> list[str]:
    return list(dict.fromkeys(name for row_values in values for name in row_values))


def _config_column(rows: Sequence[Row], name: str) -> _Column:
    ours = [format_value(row.config.get(name, "")) for row in rows]
    return _Column(name.replace("_", " "), ours, [""] * len(rows), "left")


def _metric_column(rows: Sequence[Row], name: str) -> _Column:
    ours = [format_value(row.metrics.get(name, "")) for row in rows]
    return _Column(name.replace("_", " "), ours, [_paper_cell(row, name) for row in rows], "right")


def _split(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """The columns in parts that fit in ``width``, with at least one column each."""
    part: list[_Column] = []
    for column in columns:
        if part and sum(included.width for included in part) + column.width > width:
            yield part
            part = []
        part.append(column)
    yield part


def _table(rows: Sequence[Row], configs: Sequence[_Column], metrics: Sequence[_Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = [*configs, *metrics]
    for column in columns:
        table.add_column(column.heading, justify=column.justify, width=column.width - _GAP)
    for number in range(len(rows)):
        # Skip lines without any of these metrics.
        if any(column.ours[number] for column in metrics):
            table.add_row(*(column.ours[number] for column in columns))
        if any(column.papers[number] for column in metrics):
            table.add_row(*(column.papers[number] for column in columns), style="dim")
    return table


def _paper_cell(row: Row, metric: str) -> str:
    paper = row.paper or {}
    if metric in paper:
        return format_value(paper[metric])
    if metric + LEAST in paper:
        return f"{format_value(paper[metric + LEAST])}..{format_value(paper[metric + MOST])}"
    return ""


def format_value(value: Value) -> str:
    """Three digits for small numbers, whole numbers for large ones."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
