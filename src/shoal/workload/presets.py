"""Presets: named length distributions (ShareGPT, Azure, reasoning, ...), for workloads without a file.

Fitted presets are mixtures of lognormals, fitted to the logarithms of the lengths by expectation
maximisation, with the trace's shortest and longest length as bounds. Single lognormals miss modes of real
services (outputs of Azure's conversations cluster at 85-130 and at 395-425 tokens). Prompt and output lengths
are independent. ``figures`` computes the numbers quoted in docs.
"""

from collections.abc import Mapping

import numpy as np

from shoal.workload.distributions import (
    Concatenation,
    Independent,
    IntArray,
    LengthDistribution,
    LogNormalLength,
    MixtureLength,
    UniformLength,
)

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)


def _lognormals(low: int, high: int, *parts: tuple[float, float, float]) -> MixtureLength:
    """A mixture of (weight, mu, sigma), clipped to ``low`` and ``high``."""
    return MixtureLength(tuple((share, LogNormalLength(mu, sigma, low, high)) for share, mu, sigma in parts))


DISTRIBUTION_1 = Independent(UniformLength(32, 4096), UniformLength(2048, 4096))
"""Past-Future, section 5.1: long outputs. Its 2k, 3k, 4k and 5k are 2048, 3000, 4096 and 5000 in the authors'
code (github.com/WuSiYu/lightllm-ae)."""
DISTRIBUTION_2 = Independent(UniformLength(3000, 5000), UniformLength(3000, 5000))
"""Past-Future, section 5.1: prompts and outputs alike."""
DISTRIBUTION_3 = Independent(UniformLength(2048, 4096), UniformLength(32, 4096))
"""Past-Future, section 5.1: long prompts."""

_SHAREGPT_PROMPTS = _lognormals(1, 8192, (0.510, 6.056, 0.749), (0.332, 2.656, 0.912), (0.159, 3.936, 0.850))

SHAREGPT = Independent(
    _SHAREGPT_PROMPTS,
    _lognormals(1, 2048, (0.512, 5.659, 0.599), (0.488, 3.010, 1.286)),
)
"""First question and answer of 17,387 ShareGPT conversations, in tokens of Qwen's tokenizer.

Data: prompts mean 332 (315 when cut at 8192), median 135, p90 767, p99 2685; outputs mean 197, median 122,
p90 492, p99 797. Fit: prompts mean 305, median 134, p90 807, p99 2013; outputs mean 199, median 129, p90 489,
p99 1014. Not kept: long prompts tend to have short answers (correlation of the logarithms -0.34).
"""

AZURE_CONVERSATION = Independent(
    _lognormals(2, 14050, (0.475, 5.887, 0.823), (0.374, 6.998, 0.100), (0.151, 8.077, 0.332)),
    _lognormals(7, 1000, (0.501, 4.576, 0.396), (0.290, 6.010, 0.064), (0.209, 4.708, 1.106)),
)
"""19,366 requests of Azure's conversation service (2023).

Data: prompts mean 1155, median 1020, p90 2734, p99 4142; outputs mean 211, median 129, p90 424, p99 601.
Fit: prompts mean 1167, median 1009, p90 2858, p99 5331; outputs mean 211, median 130, p90 424, p99 705.
"""

AZURE_CODE = Independent(
    _lognormals(3, 7437, (0.416, 8.052, 0.564), (0.354, 7.029, 0.555), (0.230, 5.043, 1.084)),
    _lognormals(6, 1899, (0.507, 2.216, 0.297), (0.323, 2.949, 0.422), (0.170, 4.187, 0.801)),
)
"""8,819 requests of Azure's code completion (2023).

Data: prompts mean 2048, median 1469, p90 5188, p99 7436; outputs mean 28, median 13, p90 55, p99 251.
Fit: prompts mean 1995, median 1450, p90 4696, p99 7437; outputs mean 27, median 13, p90 55, p99 232.
"""

_R1_OUTPUTS = _lognormals(9, 32768, (0.515, 6.035, 0.468), (0.340, 7.169, 0.319), (0.145, 8.439, 0.614))

REASONING = Independent(
    _lognormals(4, 57284, (0.455, 5.697, 0.668), (0.377, 3.388, 0.713), (0.168, 8.059, 1.236)),
    _R1_OUTPUTS,
)
"""DeepSeek-R1 in ServeGen's data: a day of 73 clients, weighted by their rates; reasons, then answers.

Data: prompts mean 1268, median 208, p90 2092, p99 23423; outputs mean 1527, median 792, p90 3432, p99 12607.
Fit: prompts mean 1265, median 197, p90 2369, p99 21796; outputs mean 1508, median 818, p90 3373, p99 11564.
"""

SHAREGPT_O1 = Independent(
    _lognormals(9, 10798, (0.439, 5.453, 1.230), (0.295, 3.077, 0.422), (0.266, 6.284, 0.456)),
    _lognormals(149, 10935, (0.612, 7.497, 0.601), (0.292, 7.834, 0.365), (0.096, 6.195, 0.440)),
)
"""Past-Future's ShareGPT-o1: 1,981 requests to o1-preview, from its authors' artefact.

Data (github.com/WuSiYu/lightllm-ae): prompts mean 381, median 209, p90 839, p99 2594; outputs mean 2160,
median 1954, p90 3872, p99 6451. Fit: prompts mean 381, median 204, p90 871, p99 2768; outputs mean 2164,
median 1933, p90 3859, p99 6718. Not kept: long prompts tend to have long answers (correlation of the
logarithms 0.30).
"""

VARYING = Concatenation(((1, SHAREGPT_O1), (1, DISTRIBUTION_1), (1, DISTRIBUTION_2), (1, DISTRIBUTION_3)))
"""Past-Future, Fig. 8: ShareGPT-o1, then distributions 1 to 3, with equally many requests of each."""

CODEFUSE = Independent(LogNormalLength(5.0, 1.1, 1, 1024), LogNormalLength(4.9, 0.95, 1, 1024))
"""Our guess at the trace of SCLS, which is not public and of which the paper says little (sections 3.3, 5).

Given: lengths are cut at 1024 tokens; the vast majority of outputs is below 512 and needs at most three
slices of 128. Assumed: lognormal, so that 92% of outputs are below 512 and 87% need at most three slices
(mean 203, median 134); prompts mean 243, median 149.
"""

LENGTHS: Mapping[str, LengthDistribution] = {
    "distribution-1": DISTRIBUTION_1,
    "distribution-2": DISTRIBUTION_2,
    "distribution-3": DISTRIBUTION_3,
    "sharegpt": SHAREGPT,
    "azure-conversation": AZURE_CONVERSATION,
    "azure-code": AZURE_CODE,
    "reasoning": REASONING,
    "sharegpt-o1": SHAREGPT_O1,
    "varying": VARYING,
    "codefuse": CODEFUSE,
}
"""Length distributions by name in configuration files."""


def figures(lengths: LengthDistribution, count: int = 100_000, seed: int = 0) -> dict[str, dict[str, float]]:
    """Mean and percentiles of prompts and outputs, from ``count`` draws."""
    prompts, outputs = lengths.sample(count, seed)
    return {"prompt": _summary(prompts), "output": _summary(outputs)}


def _summary(lengths: IntArray) -> dict[str, float]:
    percentiles = {f"p{percent}": float(np.percentile(lengths, percent)) for percent in PERCENTILES}
    return {"mean": float(lengths.mean()), **percentiles}
