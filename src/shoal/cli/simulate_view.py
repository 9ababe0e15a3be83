"""A simulation on the terminal: its progress bar, its facts and its results."""

import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shoal.measure import RequestRow, RunRecord, summarise, summary_tables, verdict
from shoal.measure.tables import figure, seconds


class SimulationProgress:
    """A bar on standard error that counts finished requests; one line if that is not a terminal.

    Inside the block, the first Ctrl-C requests an early end instead of ending the program.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._total = total
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task_id = self._bar.add_task("", total=total)
        self._interrupted = False
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> Self:
        """Show the bar, and handle Ctrl-C unless it is ignored, as in a background job."""
        self._handler = signal.getsignal(signal.SIGINT)
        if self._handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        self._bar.start()
        if self._bar.disable:
            print(f"simulating {self._total:,} requests", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        signal.signal(signal.SIGINT, self._handler)

    def _on_interrupt(self, number: int, frame: object) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, self._handler)

    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._interrupted

    def update(self, num_finished: int) -> None:
        self._bar.update(self._task_id, completed=num_finished)


def print_run(console: Console, run: RunRecord, elapsed_s: float) -> None:
    """Print the facts and results of a run, and the speed of the simulation."""
    console.print(facts_table(run.facts))
    if not run.requests:
        why = "No request has ended" if "stopped" in run.facts else "The workload has no requests"
        console.print(Text(f"{why}, so there is nothing to tell.", style="yellow"))
        return
    summary = summarise(run)
    for table in summary_tables(summary):
        console.print(table)
    for line in rejections(run):
        console.print(Text(line, style="yellow"))
    console.print(Text(verdict(run).text, style="bold"))
    num_requests = len(run.requests)
    speed = f"{seconds(elapsed_s)}: {figure(num_requests / elapsed_s)} requests per second"
    speedup = figure(summary.duration_s / elapsed_s)
    console.print(Text(f"Simulated in {speed}, {speedup} times real time.", style="dim"))


def facts_table(facts: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    return table


def rejections(run: RunRecord) -> list[str]:
    """For each service with rejected requests: how many, and why the first was."""
    rejected: dict[str, list[RequestRow]] = {}
    for row in run.requests:
        if row.finish == "refused":
            rejected.setdefault(row.service, []).append(row)
    return [
        f"{service} refused {len(rows):,}; the first, {rows[0].request_id}: {rows[0].error}"
        for service, rows in sorted(rejected.items())
    ]
