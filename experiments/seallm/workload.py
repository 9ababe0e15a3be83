"""Workload of SeaLLM's sharing groups: length clusters of ShareGPT and LongBench, bursty arrivals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoal.core import Request, derive_seed
from shoal.workload import LENGTHS, Empirical, Gamma, LogNormalLength, TraceRow, to_requests

Lengths = NDArray[np.int64]
"""[requests, 2]: prompt tokens, output tokens."""

CONTEXT = 4096
"""Context of Llama 2."""
LONGEST_OUTPUT = 2048
_DRAWN = 4000
_SHAREGPT_MEANS = (73.0, 426.9)
_LONGBENCH_MEANS = (13_186.8, 21.1)
_SPREAD = 0.6
"""Standard deviation of the logarithms of LongBench's lengths."""

CV = 3.0
"""Coefficient of variation of the times between requests; a Poisson process has 1."""


def sharegpt() -> Lengths:
    """Lengths with the shape of ShareGPT's and the means of the paper's Table 1."""
    prompts, outputs = (side.astype(np.float64) for side in LENGTHS["sharegpt"].sample(_DRAWN, 0))
    prompts *= _SHAREGPT_MEANS[0] / prompts.mean()
    outputs *= _SHAREGPT_MEANS[1] / outputs.mean()
    return _clipped(prompts, outputs)


def longbench() -> Lengths:
    """Lognormal lengths with the means of the paper's Table 1; prompts are cut to the context."""
    sides = []
    for key, mean in enumerate(_LONGBENCH_MEANS):
        median = float(np.log(mean)) - _SPREAD**2 / 2
        drawn = LogNormalLength(median, _SPREAD).draw(_DRAWN, derive_seed(0, key))
        sides.append(drawn.astype(np.float64))
    return _clipped(*sides)


def _clipped(prompts: NDArray[np.float64], outputs: NDArray[np.float64]) -> Lengths:
    outputs = np.clip(np.rint(outputs), 1, LONGEST_OUTPUT)
    prompts = np.clip(np.rint(prompts), 1, CONTEXT - outputs)
    return np.stack([prompts, outputs], axis=1).astype(np.int64)


def k_means(lengths: Lengths, groups: int) -> list[Lengths]:
    """The rows in ``groups`` clusters of similar lengths, shortest outputs first.

    Lloyd's algorithm on token counts, starting from quantiles of the output length.
    """
    points = lengths.astype(np.float64)
    by_output = points[np.argsort(points[:, 1], kind="stable")]
    centres = by_output[(2 * np.arange(groups) + 1) * len(points) // (2 * groups)]
    while True:
        nearest = ((points[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        means = np.stack([points[nearest == group].mean(axis=0) for group in range(groups)])
        if np.array_equal(means, centres):
            break
        centres = means
    clusters = [lengths[nearest == group] for group in range(groups)]
    return sorted(clusters, key=lambda cluster: float(cluster[:, 1].mean()))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals of a sharing group's services."""

    rate: float
    """Requests per second of all services together."""
    seconds: float
    """Length of the arrivals."""
    cv: float = CV
    """Coefficient of variation of the times between requests."""
    shares: Mapping[str, float] | None = None
    """Of the rate, by service; None: equal."""
    consecutive: int | None = None
    """Services share one stream, with this many requests in a row for each; None: independent streams."""
    output_deviation: float = 0.0
    """Standard deviation of a normal error added to every output length, as a multiple of it."""
    seed: int = 0


@cache
def _table(name: str) -> tuple[tuple[str, Empirical], ...]:
    if name == "chats":
        short, long = k_means(sharegpt(), 2)
        return (("short-chat", _pairs(short)), ("long-chat", _pairs(long)))
    if name == "chats+summaries":
        return (("summary", _pairs(longbench())), ("chat", _pairs(sharegpt())))
    raise ValueError(f"no group {name!r}")


def lengths_of(group: str) -> Mapping[str, Empirical]:
    """Lengths by service of a sharing group."""
    return dict(_table(group))


def requests_of(group: str, traffic: Traffic) -> list[Request]:
    """Requests by arrival; a higher rate has the same requests closer together, and more of them."""
    lengths = lengths_of(group)
    names = list(lengths)
    arrivals = _runs(names, traffic) if traffic.consecutive else _bursts(names, traffic)
    drawn: dict[str, Iterator[tuple[int, int]]] = {}
    for number, name in enumerate(names):
        count = sum(service == name for _, service in arrivals)
        prompts, outputs = lengths[name].sample(count, derive_seed(traffic.seed, 1, number))
        outputs = _with_error(outputs, prompts, traffic, derive_seed(traffic.seed, 2, number))
        drawn[name] = zip(prompts.tolist(), outputs.tolist(), strict=True)
    rows = [TraceRow(time, *next(drawn[name]), name) for time, name in arrivals]
    return to_requests(rows, lambda number, row: row.client or "", from_zero=False)


def _bursts(names: Sequence[str], traffic: Traffic) -> list[tuple[int, str]]:
    shares = traffic.shares or dict.fromkeys(names, 1 / len(names))
    return sorted(
        (time, name)
        for number, name in enumerate(names)
        for time in _times(traffic.rate * shares[name], traffic, derive_seed(traffic.seed, 0, number))
    )


def _runs(names: Sequence[str], traffic: Traffic) -> list[tuple[int, str]]:
    times = _times(traffic.rate, traffic, derive_seed(traffic.seed, 0))
    run = traffic.consecutive or 1
    return [(time, names[number // run % len(names)]) for number, time in enumerate(times)]


def _times(rate: float, traffic: Traffic, seed: int) -> list[int]:
    """Arrivals in nanoseconds; the same draws for every rate."""
    count = round(rate * traffic.seconds * 2) + 1000
    end_ns = round(traffic.seconds * 1e9)
    return [time for time in Gamma(rate, traffic.cv).times_ns(count, seed) if time < end_ns]


def _with_error(outputs: Lengths, prompts: Lengths, traffic: Traffic, seed: int) -> Lengths:
    if not traffic.output_deviation:
        return outputs
    normal = np.random.default_rng(seed).standard_normal(len(outputs))
    changed = np.rint(outputs * (1 + traffic.output_deviation * normal))
    return np.clip(changed, 1, CONTEXT - prompts).astype(np.int64)


def _pairs(lengths: Lengths) -> Empirical:
    return Empirical(tuple((prompt, output) for prompt, output in lengths.tolist()))
