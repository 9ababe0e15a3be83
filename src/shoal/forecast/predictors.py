"""Predictors of a single request's output length, by name.

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
"""A mean this close to a whole number differs from it only by floating-point error."""


class MaximumLengths:
    """Predicts that every request generates as much as it may."""

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """``max_new_tokens``."""
        return max_new_tokens

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""


class HistoryLengths:
    """Predicts the mean of the recent output lengths greater than what is generated, rounded up.

    Past-Future scheduler (Gong et al., section 3.2), with the mean in place of a draw. A request longer than
    all of them is predicted to be half done: if it were predicted to reach its limit, as in the paper, an
    order by remaining length would never let the first long request finish. ``history`` belongs to the
    service, which also records into it; running requests do not count.
    """

    def __init__(self, history: LengthHistory) -> None:
        self._history = history
        self._distribution: LengthDistribution | None = None
        # Predictions from that distribution, by (generated, max_new_tokens).
        self._predictions: dict[tuple[int, int], int] = {}

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """The mean of the lengths beyond ``generated``, each capped at ``max_new_tokens``."""
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
        """Nothing to learn: the owner of the history records into it."""


class OracleLengths:
    """Predicts the true output length of requests that know it (workloads), ``max_new_tokens`` for others."""

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """The true length; ``max_new_tokens`` if it is unknown or already exceeded."""
        true = request.true_output_tokens
        if true is None or true <= generated:
            return max_new_tokens
        return min(true, max_new_tokens)

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""


PREDICTORS: Mapping[str, Callable[[int, LengthHistory], LengthPredictor]] = {
    "maximum": lambda maximum, history: MaximumLengths(),
    "history": lambda maximum, history: HistoryLengths(history),
    "learned": lambda maximum, history: LearnedLengths(maximum),
    "oracle": lambda maximum, history: OracleLengths(),
}
"""Factories by name: each makes a service's predictor from its longest output and its length history."""


def make_predictor(name: str, maximum: int, history: LengthHistory) -> LengthPredictor:
    """Make a service's predictor called ``name``.

    maximum: longest output, in tokens, that the service allows. history: lengths of its finished requests,
    which its owner records, also for the ``history`` predictor. Raises ConfigError if there is no such
    predictor.
    """
    return lookup("length predictor", PREDICTORS, name)(maximum, history)
