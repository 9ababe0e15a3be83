"""Progress bars on the terminal, while models load and offline prompts run."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class _Display:
    """A progress display on standard error, if that is a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def _off(shown: bool) -> bool:
    # None where it was closed before this process started.
    return not (shown and sys.stderr is not None and sys.stderr.isatty())


class LoadProgress(_Display):
    """A line with the present activity, such as a download; removed at the end."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                disable=_off(shown),
            )
        )
        self._task = self._progress.add_task("starting", total=None)

    def doing(self, what: str) -> None:
        """Show the present activity."""
        self._progress.update(self._task, description=what)

    def fetching(self, what: str, done: int, total: int | None) -> None:
        """Show the progress of a download or conversion; done, total: in any unit."""
        self.doing(f"{what} {100 * done // total}%" if total else what)


class TokenProgress(_Display):
    """A bar over finished outputs, with output tokens per second."""

    def __init__(self, outputs: int, *, shown: bool) -> None:
        super().__init__(
            Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TextColumn("{task.fields[rate]:.0f} tokens/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                disable=_off(shown),
            )
        )
        self._tokens = 0
        self._task = self._progress.add_task("generating", total=outputs, tokens=0, rate=0.0)

    def advance(self, outputs: int, tokens: int) -> None:
        """Count more finished outputs and output tokens."""
        self._tokens += tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        self._progress.update(
            self._task,
            advance=outputs,
            tokens=self._tokens,
            rate=self._tokens / elapsed if elapsed > 0 else 0.0,
        )
