"""Output lengths that are expected of requests."""

from shoal.forecast import LengthHistory

UNKNOWN_TOKENS = 256
"""Expected of a service of which no request has ended yet."""


class ExpectedLengths:
    """The mean length of each service's recent answers."""

    def __init__(self) -> None:
        self._histories: dict[str, LengthHistory] = {}

    def expected(self, service: str, most_tokens: int) -> int:
        """Tokens that a new request will probably generate, at least 1 and at most ``most_tokens``."""
        history = self._histories.get(service)
        mean = None if history is None else history.mean
        return max(1, min(most_tokens, UNKNOWN_TOKENS if mean is None else round(mean)))

    def record(self, service: str, output_tokens: int) -> None:
        """A request finished by itself after so many tokens, at least 1."""
        history = self._histories.get(service)
        if history is None:
            history = self._histories[service] = LengthHistory(output_tokens)
        history.record(output_tokens)
