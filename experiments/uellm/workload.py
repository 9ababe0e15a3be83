"""Requests as UELLM's evaluation describes them: questions with short inputs, and goals drawn at random."""

import math

from experiments.scls.workload import Lognormal
from shoal.core import SLO, Request, SamplingParams, SyntheticPrompt, derive_seed, uniform

SERVICE = "questions"
MAX_PROMPT = 512
MAX_OUTPUT = 512
PROMPTS = Lognormal(median=30.0, sigma=0.8, most=MAX_PROMPT)
OUTPUTS = Lognormal(median=150.0, sigma=0.8, most=MAX_OUTPUT)
SHORTEST_GOAL_S, LONGEST_GOAL_S = 1.0, 350.0
BUCKETS = 10
_PROMPTS, _OUTPUTS, _GOALS, _MISTAKES = range(4)


def question_requests(count: int, seed: int = 0) -> list[Request]:
    """``count`` requests that are all there at the beginning; goals uniform over 1 to 350 s."""
    return [
        Request(
            id=f"r{number}",
            service=SERVICE,
            prompt=SyntheticPrompt(PROMPTS.at(uniform(seed, _PROMPTS, number))),
            sampling=SamplingParams(max_tokens=MAX_OUTPUT),
            seed=derive_seed(seed, number),
            true_output_tokens=OUTPUTS.at(uniform(seed, _OUTPUTS, number)),
            slo=SLO(
                e2e_s=SHORTEST_GOAL_S + (LONGEST_GOAL_S - SHORTEST_GOAL_S) * uniform(seed, _GOALS, number)
            ),
        )
        for number in range(count)
    ]


class BucketPredictor:
    """The paper's profiler as far as batching sees it: the upper end of one of ten buckets of output lengths.

    accuracy: share of requests whose bucket is right; the others are put into a neighbouring one. A request
    that has outgrown its bucket is predicted to end in the next.
    """

    def __init__(self, accuracy: float) -> None:
        self._accuracy = accuracy

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """The predicted length in whole buckets; more than ``generated``, at most ``max_new_tokens``."""
        width = max_new_tokens / BUCKETS
        if generated:
            return min(max_new_tokens, math.ceil((generated // width + 1) * width))
        true = min(request.true_output_tokens or max_new_tokens, max_new_tokens)
        bucket = math.ceil(true / width)
        draw = uniform(request.seed, _MISTAKES)
        if draw >= self._accuracy:
            wrong = bucket + (1 if draw < (1 + self._accuracy) / 2 else -1)
            bucket = wrong if 1 <= wrong <= BUCKETS else 2 * bucket - wrong
        return math.ceil(bucket * width)

    def record(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""
