"""Beliefs about the output length of a single request, by name.

Each answers with a number more than what is generated and at most the request's ceiling.
"""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import numpy as np

from shoal.core import ConfigError, LengthPredictor, Request
from shoal.forecast.learned import LearnedLengths
from shoal.forecast.lengths import IntArray, LengthDistribution, LengthHistory

_NOBODY: IntArray = np.zeros(0, dtype=np.int64)
_ROUNDING = 1e-6
"""A mean that misses a whole number by less than this misses it through floating point."""


class MaximumLengths:
    """Every request is believed to reach its ceiling."""

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        """The ceiling."""
        return ceiling

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""


class HistoryLengths:
    """The mean of the recent output lengths greater than what is generated, rounded up.

    Past-Future scheduler (Gong et al., section 3.2), with the mean in place of a draw. A request that has
    outgrown all of them is believed to be half done: were it believed to reach its ceiling, as there, an
    order by remaining length would never let the first long one finish. ``history`` belongs to the service
    and is recorded there; requests that still run are not asked.
    """

    def __init__(self, history: LengthHistory) -> None:
        self._history = history
        self._seen: LengthDistribution | None = None
        self._answers: dict[tuple[int, int], int] = {}

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        """The mean beyond ``generated``; lengths above the ceiling count as the ceiling."""
        lengths = self._history.distribution(_NOBODY)
        if lengths is not self._seen:
            self._seen = lengths
            self._answers.clear()
        answer = self._answers.get((generated, ceiling))
        if answer is None:
            longest = int(lengths.lengths[-1]) if len(lengths.lengths) else ceiling
            if generated >= longest:
                return min(2 * generated, ceiling)
            [mean] = lengths.mean_beyond(np.array([generated]), np.array([ceiling]))
            answer = min(max(math.ceil(mean - _ROUNDING), generated + 1), ceiling)
            self._answers[generated, ceiling] = answer
        return answer

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn: whoever owns the history records there."""


class OracleLengths:
    """The true output length of requests that know it (workloads), the ceiling for all others."""

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        """The truth; the ceiling where there is none, or where the request has outgrown it."""
        true = request.true_output_tokens
        if true is None or true <= generated:
            return ceiling
        return min(true, ceiling)

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""


PREDICTORS: Mapping[str, Callable[[int, LengthHistory], LengthPredictor]] = {
    "maximum": lambda maximum, history: MaximumLengths(),
    "history": lambda maximum, history: HistoryLengths(history),
    "learned": lambda maximum, history: LearnedLengths(maximum),
    "oracle": lambda maximum, history: OracleLengths(),
}
"""By name: makes the predictor of one service from its longest output and its history of lengths."""


def make_predictor(name: str, maximum: int, history: LengthHistory) -> LengthPredictor:
    """One service's predictor called ``name``.

    maximum: longest output, in tokens, that the service allows. history: its finished requests; its owner
    records them, also for ``history``. Raises ConfigError if there is no such predictor.
    """
    if name not in PREDICTORS:
        near = get_close_matches(name, PREDICTORS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"length predictor {name!r} is not known; {hint}possible are {', '.join(sorted(PREDICTORS))}"
        )
    return PREDICTORS[name](maximum, history)
