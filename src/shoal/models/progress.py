"""Reports of progress from work that takes long."""

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
