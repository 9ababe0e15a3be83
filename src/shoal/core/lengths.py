"""What a belief about output lengths must answer."""

from typing import Protocol

from shoal.core.request import Request


class LengthPredictor(Protocol):
    """Beliefs about one service's output lengths; a number for each request."""

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        """The believed output length in tokens: more than ``generated``, at most ``ceiling``.

        Asked when a request is submitted (``generated`` 0), and again whenever it has generated as many
        tokens as were predicted and has not ended (it outgrew its prediction). ``generated < ceiling``.
        """
        ...

    def record(self, request: Request, output_tokens: int) -> None:
        """A request has finished (never a cancelled or failed one): learn from it."""
        ...
