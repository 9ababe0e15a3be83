"""The interface of predictors of output lengths."""

from typing import Protocol

from shoal.core.request import Request


class LengthPredictor(Protocol):
    """Predicts the output lengths of one service's requests."""

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """The predicted output length in tokens: more than ``generated``, at most ``max_new_tokens``.

        Called when a request is submitted (``generated`` 0), and again each time its output has reached the
        predicted length without ending. ``generated`` is less than ``max_new_tokens``.
        """
        ...

    def record(self, request: Request, output_tokens: int) -> None:
        """Learn from a finished request; not called for cancelled or failed ones."""
        ...
