"""Output-length predictors by name: maximum, history, learned, oracle.

A prediction is more than the tokens generated so far and at most the request's ``max_new_tokens``.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from shoal.core import LengthPredictor, Request, lookup
from shoal.forecast.learned import LearnedLengths
from shoal.forecast.lengths import IntArray, LengthDistribution, LengthHistory

_NO_RUNNING: IntArray = np.zeros(0, dtype=np.int64)
_ROUNDING = 1e-6
"""Tolerance for floating-point errors of a mean that is a whole number."""


class MaximumLengths:
    """Predicts ``max_new_tokens`` for every request."""

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        return max_new_tokens

    def record(self, request: Request, output_tokens: int) -> None:
        """Does nothing."""


class HistoryLengths:
    """Predicts the mean of the recent output lengths greater than what is generated, rounded up.

    Past-Future scheduler (Gong et al., section 3.2), with the mean instead of a draw. A request longer than
    all of them is predicted to be half done: predicting its limit, as in the paper, would starve the first
    long request in an order by remaining length. ``history`` belongs to the service, which records into it;
    running requests do not count.
    """

    def __init__(self, history: LengthHistory) -> None:
        self._history = history
        self._distribution: LengthDistribution | None = None
        # Cache of predictions from the distribution, by (generated, max_new_tokens).
        self._predictions: dict[tuple[int, int], int] = {}

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        distribution = self._history.distribution(_NO_RUNNING)
        if distribution is not self._distribution:
            self._distribution = distribution
            self._predictions.clear()
        prediction = self._predictions.get((generated, max_new_tokens))
        if prediction is None:
            lengths = distribution.lengths
            longest = int(lengths[-1]) if len(lengths) else max_new_tokens
            if generated >= longest:
                return min(2 * generated, max_new_tokens)
            [mean] = distribution.mean_beyond(np.array([generated]), np.array([max_new_tokens]))
            prediction = min(max(math.ceil(mean - _ROUNDING), generated + 1), max_new_tokens)
            self._predictions[generated, max_new_tokens] = prediction
        return prediction

    def record(self, request: Request, output_tokens: int) -> None:
        """Does nothing: the service records into the history."""


class OracleLengths:
    """Predicts ``true_output_tokens`` of simulated requests; ``max_new_tokens`` if unknown or exceeded."""

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        true = request.true_output_tokens
        if true is None or true <= generated:
            return max_new_tokens
        return min(true, max_new_tokens)

    def record(self, request: Request, output_tokens: int) -> None:
        """Does nothing."""


PREDICTORS: Mapping[str, Callable[[int, LengthHistory], LengthPredictor]] = {
    "maximum": lambda maximum, history: MaximumLengths(),
    "history": lambda maximum, history: HistoryLengths(history),
    "learned": lambda maximum, history: LearnedLengths(maximum),
    "oracle": lambda maximum, history: OracleLengths(),
}
"""Factories by name, with a service's longest output and its length history as arguments."""


def make_predictor(name: str, maximum: int, history: LengthHistory) -> LengthPredictor:
    """Make the predictor ``name`` for one service; raises ConfigError for an unknown name.

    maximum: longest output, in tokens, that the service allows. history: lengths of its finished requests,
    which the service records.
    """
    return lookup("length predictor", PREDICTORS, name)(maximum, history)
