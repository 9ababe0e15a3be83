"""Workload of Mell's evaluation: conversations ten times as long, Poisson arrivals or Azure's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.past_future.traces import traces_folder
from shoal.core import derive_seed
from shoal.simulate.packed_cluster import GrowingRequest
from shoal.workload import load_trace

TIMES_LONGER = 10
AZURE = "azure"
POISSON_RATES = {"poisson-0.5": 0.5, "poisson-0.8": 0.8, "poisson-1.1": 1.1}
WORKLOADS = (*POISSON_RATES, AZURE)
_AZURE_TRACE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
_AZURE_RATE = 1.1
_ARRIVALS, _PROMPTS, _OUTPUTS, _DATASET = range(4)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Lognormal lengths of a data set, in tokens."""

    prompt_mean: float
    prompt_sigma: float
    """Standard deviation of the logarithm."""
    output_mean: float
    output_sigma: float
    """Standard deviation of the logarithm."""


LMSYS = Conversations(69.5, 1.2, 214.5, 0.9)
WILDCHAT = Conversations(295.6, 1.4, 441.3, 0.8)


def azure_arrivals() -> npt.NDArray[np.float64] | None:
    """Arrivals in seconds since the first in Azure's conversation trace; None if it is missing."""
    folder = traces_folder()
    if folder is None or not (folder / _AZURE_TRACE).exists():
        return None
    arrivals = np.array([row.arrival_ns for row in load_trace(folder / _AZURE_TRACE).rows], dtype=np.int64)
    return np.asarray((arrivals - arrivals[0]) / 1e9, dtype=np.float64)


def mell_requests(workload: str | float, seconds: float, seed: int, capacity: int) -> list[GrowingRequest]:
    """Requests by arrival within ``seconds``.

    workload: one of ``WORKLOADS``, or a Poisson rate per second. capacity: KV tokens of a device. Prompts are
    cut at half of it, prompt and response together at 7/8, so that every request fits on a device.
    """
    if workload == AZURE:
        arrivals = _azure(seconds, seed)
    else:
        rate = POISSON_RATES[workload] if isinstance(workload, str) else workload
        arrivals = _poisson(rate, seconds, seed)
    prompts, outputs = lengths(len(arrivals), seed)
    prompts = np.minimum(prompts, capacity // 2)
    outputs = np.minimum(outputs, capacity * 7 // 8 - prompts)
    return [
        GrowingRequest(f"r{number}", float(arrival), int(prompt), int(output))
        for number, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def lengths(count: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Prompt and response tokens [count], half from each data set, not cut."""
    prompts, outputs = np.empty((2, count), dtype=np.int64)
    from_lmsys = _random(seed, _DATASET).random(count) < 0.5
    normal_prompts = _random(seed, _PROMPTS).standard_normal(count)
    normal_outputs = _random(seed, _OUTPUTS).standard_normal(count)
    for chosen, data in ((from_lmsys, LMSYS), (~from_lmsys, WILDCHAT)):
        prompts[chosen] = _lognormal(data.prompt_mean, data.prompt_sigma, normal_prompts[chosen])
        outputs[chosen] = _lognormal(data.output_mean, data.output_sigma, normal_outputs[chosen])
    return prompts, outputs


def _lognormal(mean: float, sigma: float, normal: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    drawn = mean * np.exp(sigma * normal - sigma * sigma / 2)
    return np.maximum(1, np.rint(TIMES_LONGER * drawn)).astype(np.int64)


def _poisson(rate: float, seconds: float, seed: int) -> Sequence[float]:
    random = _random(seed, _ARRIVALS)
    arrivals = np.cumsum(random.exponential(1 / rate, size=math.ceil(rate * seconds * 1.5) + 100))
    return list(arrivals[arrivals < seconds])


def _azure(seconds: float, seed: int) -> Sequence[float]:
    """Part of the trace from a random time on, thinned to the highest Poisson rate."""
    trace = azure_arrivals()
    assert trace is not None
    random = _random(seed, _ARRIVALS)
    kept = trace[random.random(len(trace)) < _AZURE_RATE * trace[-1] / len(trace)]
    since = kept - random.uniform(0, max(0.0, trace[-1] - seconds))
    return list(since[(since >= 0) & (since < seconds)])


def _random(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, purpose))
