"""Expected output lengths of new requests: the mean of each service's recent answers."""

from shoal.forecast import LengthHistory

UNKNOWN_TOKENS = 256
"""Used until a request of the service has ended."""


class ExpectedLengths:
    """Mean length of each service's recent answers."""

    def __init__(self) -> None:
        self._histories: dict[str, LengthHistory] = {}

    def expected(self, service: str, most_tokens: int) -> int:
        """Expected output tokens of a new request, from 1 to ``most_tokens``."""
        history = self._histories.get(service)
        mean = None if history is None else history.mean
        return max(1, min(most_tokens, UNKNOWN_TOKENS if mean is None else round(mean)))

    def record(self, service: str, output_tokens: int) -> None:
        """Record a request that finished normally; output_tokens: at least 1."""
        history = self._histories.get(service)
        if history is None:
            history = self._histories[service] = LengthHistory(output_tokens)
        history.record(output_tokens)
