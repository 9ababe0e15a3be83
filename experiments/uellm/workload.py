"""Workload of UELLM's evaluation: short questions with random SLOs, and its predictor of output lengths."""

import math

from experiments.scls.workload import Lognormal
from shoal.core import SLO, Request, SamplingParams, SyntheticPrompt, derive_seed, uniform

SERVICE = "questions"
MAX_PROMPT = 512
MAX_OUTPUT = 512
PROMPTS = Lognormal(median=30.0, sigma=0.8, maximum=MAX_PROMPT)
OUTPUTS = Lognormal(median=150.0, sigma=0.8, maximum=MAX_OUTPUT)
LEAST_SLO_S, MOST_SLO_S = 1.0, 350.0
BUCKETS = 10
_PROMPTS, _OUTPUTS, _SLOS, _ERRORS = range(4)


def question_requests(count: int, seed: int = 0) -> list[Request]:
    """``count`` requests, all at time 0, with SLOs uniform over 1 to 350 s."""
    return [
        Request(
            id=f"r{number}",
            service=SERVICE,
            prompt=SyntheticPrompt(PROMPTS.at(uniform(seed, _PROMPTS, number))),
            sampling=SamplingParams(max_tokens=MAX_OUTPUT),
            seed=derive_seed(seed, number),
            true_output_tokens=OUTPUTS.at(uniform(seed, _OUTPUTS, number)),
            slo=SLO(e2e_s=LEAST_SLO_S + (MOST_SLO_S - LEAST_SLO_S) * uniform(seed, _SLOS, number)),
        )
        for number in range(count)
    ]


class BucketPredictor:
    """The paper's length predictor: the upper end of one of ten buckets of output lengths.

    accuracy: share of requests with the right bucket; the rest get a neighbouring one. A request that has
    outgrown its bucket is predicted to end in the next.
    """

    def __init__(self, accuracy: float) -> None:
        self._accuracy = accuracy

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """Predicted output length, more than ``generated``, at most ``max_new_tokens``."""
        width = max_new_tokens / BUCKETS
        if generated:
            return min(max_new_tokens, math.ceil((generated // width + 1) * width))
        true = min(request.true_output_tokens or max_new_tokens, max_new_tokens)
        bucket = math.ceil(true / width)
        draw = uniform(request.seed, _ERRORS)
        if draw >= self._accuracy:
            wrong = bucket + (1 if draw < (1 + self._accuracy) / 2 else -1)
            bucket = wrong if 1 <= wrong <= BUCKETS else 2 * bucket - wrong
        return math.ceil(bucket * width)

    def record(self, request: Request, output_tokens: int) -> None:
        """Does nothing: the predictor does not learn."""
