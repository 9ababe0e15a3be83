"""Progress reports of downloads and conversions."""

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called during a pull or a conversion.

    what: the current activity. done, total: bytes of a download, else steps; total is None if it is unknown.
    """

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Called often, so it should be quick."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """A ``Progress`` that ignores all reports."""


def in_words(send: Callable[[str], None], again_s: float = 10.0) -> Progress:
    """A ``Progress`` that sends a line of text whenever the text changes.

    While the work progresses, or if its total is unknown, the same text is sent again after ``again_s``, to
    show that it does not hang.
    """
    last, last_done, last_s = "", 0, 0.0

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal last, last_done, last_s
        text = what if not total else f"{what}: {100 * done // total}%"
        progressed = total is None or done > last_done
        if text != last or (progressed and time.monotonic() - last_s >= again_s):
            last, last_done, last_s = text, done, time.monotonic()
            send(text)

    return report
