"""Reports of progress from work that takes long."""

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called now and then during a pull or a conversion.

    what: the current activity, in words. done, total: bytes while something is downloaded, steps
    otherwise; total is None where it is not known.
    """

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Take one report; called often, so it should be quick."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """A ``Progress`` that ignores all reports."""


def in_words(tell: Callable[[str], None], again_s: float = 10.0) -> Progress:
    """A ``Progress`` that tells in words how far the work is, whenever these change.

    While it gets on, or nobody knows how far it is, the same words are told again after ``again_s``: whoever
    waits for it can tell that it does not hang.
    """
    last, last_done, last_s = "", 0, 0.0

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal last, last_done, last_s
        text = what if not total else f"{what}: {100 * done // total}%"
        got_on = total is None or done > last_done
        if text != last or (got_on and time.monotonic() - last_s >= again_s):
            last, last_done, last_s = text, done, time.monotonic()
            tell(text)

    return report
