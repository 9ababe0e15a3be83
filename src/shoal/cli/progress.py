"""Progress bar on standard error for downloads, conversions, loading and searches."""

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


class ProgressDisplay:
    """A progress bar on a terminal, removed at the end; elsewhere one line for each task.

    ``update`` is the callback of tasks that count bytes or steps, ``message`` of those that do not.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._last_shown: str | None = None
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                _Amount(),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task_id = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar before the block ends."""
        if self._bar:
            self._bar.stop()

    def update(self, what: str, done: int, total: int | None) -> None:
        if self._bar:
            if what != self._last_shown:
                self._bar.reset(self._task_id, description=what, total=total)
            self._bar.update(self._task_id, description=what, completed=done, total=total)
        elif what != self._last_shown:
            print(what, file=sys.stderr, flush=True)
        self._last_shown = what

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def message(self, what: str) -> None:
        """Show a task whose progress is not known."""
        self.update(what, 0, None)


class _Amount(DownloadColumn):
    """Megabytes for bytes, plain numbers for a few steps, nothing if the total is unknown."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        if task.total < 10_000:
            return Text(f"{int(task.completed)}/{int(task.total)}")
        return super().render(task)
