"""Prints a benchmark's results so far when Ctrl-C ends it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


@contextmanager
def show_at_end(show: Callable[[], None]) -> Iterator[None]:
    """Call ``show`` at the end of the block; after Ctrl-C the program then exits with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; this was measured so far:", file=sys.stderr)
        show()
        raise SystemExit(INTERRUPTED) from None
    show()


@contextmanager
def print_at_end(table: "Table", width: int | None = None) -> Iterator[None]:
    """Print a table at the end of the block, also after Ctrl-C."""
    from rich.console import Console  # optional for callers of show_at_end

    with show_at_end(lambda: Console(width=width).print(table)):
        yield
