"""Predicted output lengths of new requests, for batches (UELLM's profiler, section 4.1)."""

from shoal.core import SLO, LengthPredictor, Request
from shoal.core.slo import resolve_slo
from shoal.forecast import LengthHistory, make_predictor


class PredictedLengths:
    """One predictor for each service, which learns from finished requests.

    name: one of ``PREDICTORS``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._services: dict[str, tuple[LengthPredictor, LengthHistory]] = {}

    def facts(
        self, request: Request, most_tokens: int, slo: SLO, execution_s: float | None
    ) -> tuple[int, float | None]:
        """What batches are formed by: predicted output in tokens, and end-to-end goal in seconds.

        slo, execution_s: of the request's service. Raises InvalidRequest as ``resolve_slo`` does.
        """
        return self.predict(request, most_tokens), resolve_slo(request.slo, slo, execution_s).e2e_s

    def predict(self, request: Request, most_tokens: int) -> int:
        """The predicted output length of a new request, from 1 to ``most_tokens``."""
        predictor, _ = self._service(request, most_tokens)
        return max(1, min(predictor.predict(request, 0, most_tokens), most_tokens))

    def record(self, request: Request, output_tokens: int) -> None:
        """Learn from a request that finished normally; output_tokens: at least 1."""
        predictor, history = self._service(request, output_tokens)
        history.record(output_tokens)
        predictor.record(request, output_tokens)

    def _service(self, request: Request, longest: int) -> tuple[LengthPredictor, LengthHistory]:
        found = self._services.get(request.service)
        if found is None:
            history = LengthHistory(longest)
            found = make_predictor(self._name, max(longest, _LONGEST), history), history
            self._services[request.service] = found
        return found


_LONGEST = 8192
"""Longest output with a bucket of its own, for predictors that have buckets."""
