"""A simulation on the terminal: its progress while it runs, and its figures."""

import sys
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shoal.measure import RequestRow, RunRecord, summarise, summary_tables
from shoal.measure.tables import figure, seconds


class Answered:
    """A bar on standard error that counts the requests that have ended; a line where it is no terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._total = total
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._bar.start()
        if self._bar.disable:
            print(f"simulating {self._total:,} requests", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe the bar away, also after Ctrl-C."""
        self._bar.stop()

    def advance(self, ended: int) -> None:
        """So many requests have ended."""
        self._bar.update(self._task, completed=ended)


def print_run(console: Console, run: RunRecord, took_s: float) -> None:
    """The facts and figures of a run, and how fast it was simulated."""
    console.print(facts_table(run))
    if not run.requests:
        console.print(Text("The workload has no requests, so there is nothing to tell.", style="yellow"))
        return
    summary = summarise(run)
    for table in summary_tables(summary):
        console.print(table)
    for line in refusals(run):
        console.print(Text(line, style="yellow"))
    count = len(run.requests)
    speed = f"{seconds(took_s)}: {figure(count / took_s)} requests per second"
    faster = figure(summary.duration_s / took_s)
    console.print(Text(f"Simulated in {speed}, {faster} times real time.", style="dim"))


def facts_table(run: RunRecord) -> Table:
    """What was run."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in run.facts.items():
        table.add_row(Text(name), Text(value))
    return table


def refusals(run: RunRecord) -> list[str]:
    """For each service whose requests were refused: how many, and why the first was."""
    refused: dict[str, list[RequestRow]] = {}
    for row in run.requests:
        if row.finish == "refused":
            refused.setdefault(row.service, []).append(row)
    return [
        f"{service} refused {len(rows):,}; the first, {rows[0].request_id}: {rows[0].error}"
        for service, rows in sorted(refused.items())
    ]
