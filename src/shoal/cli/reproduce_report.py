"""Results of reproductions on the terminal."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.reproduce import Reproduction, Result, Row
from shoal.reproduce.result import LEAST, MOST, Value

_GAP = 2
"""Blank cells between two columns."""


def list_table(reproductions: Sequence[Reproduction]) -> Table:
    """What can be reproduced."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("paper")
    table.add_column("measures")
    for one in reproductions:
        table.add_row(one.name, one.paper, one.says)
    return table


def print_result(console: Console, result: Result, quick: bool) -> None:
    """Our figures with the paper's below them, then what they rest on."""
    console.print(Text(f"{result.name}: {result.paper}", style="bold"))
    if quick:
        console.print(Text("quick: smaller than the real one, figures are rough", style="yellow"))
    for table in result_tables(result, console.width):
        console.print(table)
    console.print(Text("Assumptions", style="bold"))
    for line in result.assumptions:
        console.print(Text("- " + line))


def result_tables(result: Result, width: int) -> list[Table]:
    """A line for each row, and below it, in grey, the paper's figures for the same metrics.

    width: of the terminal. Where not all metrics fit beside the configuration, more tables follow.
    """
    configs = [_config_column(result.rows, name) for name in _names(row.config for row in result.rows)]
    if configs and any(row.paper is not None for row in result.rows):
        configs[0] = configs[0].labelled("paper")
    metrics = [_metric_column(result.rows, name) for name in _names(row.metrics for row in result.rows)]
    room = width - sum(column.width for column in configs)
    return [_table(result.rows, configs, part) for part in _fitting(metrics, room)]


@dataclass(frozen=True)
class _Column:
    """A heading, and the cells of our rows and of the paper's below them."""

    heading: str
    ours: Sequence[str]
    papers: Sequence[str]
    justify: Literal["left", "right"]

    @property
    def width(self) -> int:
        """Cells that it takes, with the gap after it; its heading may break between words."""
        return _GAP + max(map(len, (*self.heading.split(), *self.ours, *self.papers)), default=0)

    def labelled(self, label: str) -> "_Column":
        """The same, with a word in the paper's rows."""
        return _Column(self.heading, self.ours, [label] * len(self.papers), self.justify)


def _names(values: Iterable[Mapping[str, Value]]) -> list[str]:
    return list(dict.fromkeys(name for one in values for name in one))


def _config_column(rows: Sequence[Row], name: str) -> _Column:
    ours = [format_value(row.config.get(name, "")) for row in rows]
    return _Column(name.replace("_", " "), ours, [""] * len(rows), "left")


def _metric_column(rows: Sequence[Row], name: str) -> _Column:
    ours = [format_value(row.metrics.get(name, "")) for row in rows]
    return _Column(name.replace("_", " "), ours, [_of_paper(row, name) for row in rows], "right")


def _fitting(columns: Sequence[_Column], room: int) -> Iterator[list[_Column]]:
    """The columns in parts that fit in ``room``, at least one in each."""
    part: list[_Column] = []
    for column in columns:
        if part and sum(one.width for one in part) + column.width > room:
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
        # Lines only where there is something to say about these metrics.
        if any(column.ours[number] for column in metrics):
            table.add_row(*(column.ours[number] for column in columns))
        if any(column.papers[number] for column in metrics):
            table.add_row(*(column.papers[number] for column in columns), style="dim")
    return table


def _of_paper(row: Row, metric: str) -> str:
    paper = row.paper or {}
    if metric in paper:
        return format_value(paper[metric])
    if metric + LEAST in paper:
        return f"{format_value(paper[metric + LEAST])}..{format_value(paper[metric + MOST])}"
    return ""


def format_value(value: Value) -> str:
    """Three digits of what is small, all digits before the point of what is large."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
