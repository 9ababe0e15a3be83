"""What an executor of static batches promises to whoever drives it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StaticResult:
    """One static batch that has been served; lists have an entry for each prompt, in their order."""

    outputs: list[list[int]]
    """Tokens of this run, up to and including one that ends the request, at most its limit."""
    ended: list[bool]
    """Whether the last of them is such a token."""
    iterations_run: int
    """Forward passes, the prefill included."""
    duration_ns: int
    """Wall time of the whole batch."""


class StaticExecutor(Protocol):
    """Runs one padded batch at a time."""

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        iterations: int,
        limits: Sequence[int],
        ends: Sequence[Collection[int]] | None = None,
    ) -> StaticResult:
        """Serve a batch for at most ``iterations`` iterations, or until nobody needs another.

        prompts: every token known of each request, none empty. limits: how many more tokens each may
        generate, at least 1; a request at its limit waits for the batch to end, as one that has ended does.
        ends: tokens that end each request; None: the model's end-of-sequence tokens end them all.
        """
        ...

    def interrupt(self) -> None:
        """Nothing more is wanted: the batch that runs, and any later one, ends after one more iteration.

        Called from another thread; results are then cut short.
        """
        ...
