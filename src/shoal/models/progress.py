"""How long work tells whoever waits for it how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then during a pull or a conversion.

    what: the current activity, in words. done, total: bytes while something is downloaded, steps
    otherwise; total is None where it is not known.
    """

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Take note of one report; called often, so it should be quick."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """The progress of someone who does not want to know."""
