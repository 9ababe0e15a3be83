"""Workload of SCLS's evaluation: Poisson arrivals, lognormal lengths of a chatbot for code.

The paper prints the limits of the lengths (1024 and 1024), not their distributions: the vast majority of
outputs is shorter than 512 (section 3.3), and most requests end within three slices of 128 (section 5.2).
Lengths are cut at the limits, as in the paper.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from shoal.core import Request, SamplingParams, SyntheticPrompt, uniform

SERVICE = "codefuse"
MAX_PROMPT, MAX_OUTPUT = 1024, 1024
_STANDARD = NormalDist()
_ARRIVALS, _PROMPTS, _OUTPUTS = range(3)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal lengths in tokens, rounded."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    maximum: int
    """Lengths are clipped to 1 and this."""

    def at(self, quantile: float) -> int:
        deviation = _STANDARD.inv_cdf(min(max(quantile, 1e-12), 1 - 1e-12))
        return max(1, min(self.maximum, round(self.median * math.exp(self.sigma * deviation))))


PROMPTS = Lognormal(median=500.0, sigma=1.0, maximum=MAX_PROMPT)
OUTPUTS = Lognormal(median=150.0, sigma=0.8, maximum=MAX_OUTPUT)


def codefuse_requests(rate: float, seconds: float, seed: int = 0) -> list[Request]:
    """Requests that arrive within ``seconds``; with the same seed, all rates have the same lengths."""
    requests: list[Request] = []
    now_s = 0.0
    while True:
        number = len(requests)
        now_s -= math.log(1 - uniform(seed, _ARRIVALS, number)) / rate
        if now_s >= seconds:
            return requests
        requests.append(
            Request(
                id=f"r{number}",
                service=SERVICE,
                prompt=SyntheticPrompt(PROMPTS.at(uniform(seed, _PROMPTS, number))),
                sampling=SamplingParams(max_tokens=MAX_OUTPUT),
                arrival_ns=round(now_s * 1e9),
                true_output_tokens=OUTPUTS.at(uniform(seed, _OUTPUTS, number)),
            )
        )
