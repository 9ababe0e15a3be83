"""The interface of executors of static batches, and their result."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StaticResult:
    """Result of one static batch; lists have an entry for each prompt, in their order."""

    outputs: list[list[int]]
    """New tokens, up to a token that ends the request (inclusive) or its limit."""
    ended: list[bool]
    """Whether the last token ends the request."""
    iterations_run: int
    """Forward passes, including the prefill."""
    duration_ns: int
    """Wall time of the batch."""


class StaticExecutor(Protocol):
    """Runs one padded batch at a time."""

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        iterations: int,
        limits: Sequence[int],
        ends: Sequence[Collection[int]] | None = None,
    ) -> StaticResult:
        """Serve a batch for at most ``iterations`` iterations, or until all its requests have ended.

        prompts: prompt and output so far of each request, not empty. limits: maximum new tokens of each, at
        least 1; a request at its limit waits for the end of the batch. ends: tokens that end each request;
        None: the model's end-of-sequence tokens.
        """
        ...

    def interrupt(self) -> None:
        """End the running batch, and any later one, after one more iteration; results are cut short.

        Called from another thread.
        """
        ...
