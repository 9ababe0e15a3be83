"""What a benchmark has measured is shown when Ctrl-C ends it, too."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

INTERRUPTED = 130
"""The exit status of a program that Ctrl-C ended."""


@contextmanager
def shown_at_end(show: Callable[[], None]) -> Iterator[None]:
    """Call ``show`` at the end of the block. Where Ctrl-C ends it, the program ends then, with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; this was measured so far:", file=sys.stderr)
        show()
        raise SystemExit(INTERRUPTED) from None
    show()


@contextmanager
def printed_at_end(table: "Table", width: int | None = None) -> Iterator[None]:
    """Print a table with the rows that it has by the end of the block, which may be Ctrl-C."""
    from rich.console import Console  # what prints no such table does without

    with shown_at_end(lambda: Console(width=width).print(table)):
        yield
