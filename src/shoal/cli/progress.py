"""Shows on standard error what a command waits for: downloads, conversion, loading."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Waiting:
    """A bar on a terminal that is gone when the wait is over; elsewhere one plain line for each thing.

    ``advance`` is what ``shoal.models`` calls while it fetches and converts (done and total in bytes or
    steps), ``say`` what an engine calls while it loads.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._said: str | None = None
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                _Amount(),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe the bar away."""
        self.stop()

    def stop(self) -> None:
        """Wipe the bar away before the block ends."""
        if self._bar:
            self._bar.stop()

    def advance(self, what: str, done: int, total: int | None) -> None:
        """How far ``what`` is."""
        if self._bar:
            if what != self._said:
                self._bar.reset(self._task, description=what, total=total)
            self._bar.update(self._task, description=what, completed=done, total=total)
        elif what != self._said:
            print(what, file=sys.stderr, flush=True)
        self._said = what

    def say(self, what: str) -> None:
        """What is being done, where nobody knows how far it is."""
        self.advance(what, 0, None)


class _Amount(DownloadColumn):
    """Megabytes for what is counted in bytes, plain numbers for few steps, nothing where unknown."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        if task.total is None:
            return Text("")
        if task.total < 10_000:
            return Text(f"{int(task.completed)}/{int(task.total)}")
        return super().render(task)
