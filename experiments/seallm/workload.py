"""Requests as SeaLLM's evaluation sends them: services cut from datasets by length, arrivals in bursts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoal.core import Request, derive_seed
from shoal.workload import LENGTHS, Empirical, Gamma, LogNormalLength, TraceRow, to_requests

Lengths = NDArray[np.int64]
"""One request a row: prompt tokens, output tokens."""

CONTEXT = 4096
"""Tokens of Llama 2."""
LONGEST_OUTPUT = 2048
_DRAWN = 4000
_SHAREGPT_MEANS = (73.0, 426.9)
_LONGBENCH_MEANS = (13_186.8, 21.1)
_SPREAD = 0.6
"""Standard deviation of the logarithms of LongBench's lengths."""

CV = 3.0
"""Of the times between requests; a Poisson process has 1."""


def sharegpt() -> Lengths:
    """Lengths with the shape of ShareGPT's and the means of the paper's Table 1."""
    prompts, outputs = (side.astype(np.float64) for side in LENGTHS["sharegpt"].sample(_DRAWN, 0))
    prompts *= _SHAREGPT_MEANS[0] / prompts.mean()
    outputs *= _SHAREGPT_MEANS[1] / outputs.mean()
    return _fitting(prompts, outputs)


def longbench() -> Lengths:
    """Lognormal lengths with the means of the paper's Table 1; prompts are cut where the context ends."""
    sides = []
    for key, mean in enumerate(_LONGBENCH_MEANS):
        median = float(np.log(mean)) - _SPREAD**2 / 2
        drawn = LogNormalLength(median, _SPREAD).draw(_DRAWN, derive_seed(0, key))
        sides.append(drawn.astype(np.float64))
    return _fitting(*sides)


def _fitting(prompts: NDArray[np.float64], outputs: NDArray[np.float64]) -> Lengths:
    outputs = np.clip(np.rint(outputs), 1, LONGEST_OUTPUT)
    prompts = np.clip(np.rint(prompts), 1, CONTEXT - outputs)
    return np.stack([prompts, outputs], axis=1).astype(np.int64)


def k_means(lengths: Lengths, groups: int) -> list[Lengths]:
    """The rows in ``groups`` clusters of like lengths, those with the shortest outputs first.

    Lloyd's algorithm on the numbers of tokens, from quantiles of the output length.
    """
    points = lengths.astype(np.float64)
    by_output = points[np.argsort(points[:, 1], kind="stable")]
    centres = by_output[(2 * np.arange(groups) + 1) * len(points) // (2 * groups)]
    while True:
        nearest = ((points[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        moved = np.stack([points[nearest == group].mean(axis=0) for group in range(groups)])
        if np.array_equal(moved, centres):
            break
        centres = moved
    clusters = [lengths[nearest == group] for group in range(groups)]
    return sorted(clusters, key=lambda cluster: float(cluster[:, 1].mean()))


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests of several services arrive."""

    rate: float
    """Requests per second, of all services."""
    seconds: float
    """For how long they arrive."""
    cv: float = CV
    """Coefficient of variation of the times between them; every service has bursts of its own."""
    shares: Mapping[str, float] | None = None
    """Of each service in the rate; None: equal ones."""
    consecutive: int | None = None
    """There is one stream, of which so many requests in a row are for one service; None: one for each."""
    output_deviation: float = 0.0
    """Standard deviation of a normal error that is added to every output length, as a multiple of it."""
    seed: int = 0
    """Keys every draw."""


@cache
def _table(name: str) -> tuple[tuple[str, Empirical], ...]:
    if name == "chats":
        short, long = k_means(sharegpt(), 2)
        return (("short-chat", _pairs(short)), ("long-chat", _pairs(long)))
    if name == "chats+summaries":
        return (("summary", _pairs(longbench())), ("chat", _pairs(sharegpt())))
    raise ValueError(f"no group {name!r}")


def lengths_of(group: str) -> Mapping[str, Empirical]:
    """The lengths of each service of a sharing group."""
    return dict(_table(group))


def requests_of(group: str, traffic: Traffic) -> list[Request]:
    """The requests; another rate has the same ones (but for how many there are), closer together."""
    lengths = lengths_of(group)
    names = list(lengths)
    arrivals = _runs(names, traffic) if traffic.consecutive else _bursts(names, traffic)
    drawn: dict[str, Iterator[tuple[int, int]]] = {}
    for number, name in enumerate(names):
        count = sum(service == name for _, service in arrivals)
        prompts, outputs = lengths[name].sample(count, derive_seed(traffic.seed, 1, number))
        outputs = _misjudged(outputs, prompts, traffic, derive_seed(traffic.seed, 2, number))
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
    """Arrivals within the time; the same draws for every rate."""
    count = round(rate * traffic.seconds * 2) + 1000
    end_ns = round(traffic.seconds * 1e9)
    return [time for time in Gamma(rate, traffic.cv).times_ns(count, seed) if time < end_ns]


def _misjudged(outputs: Lengths, prompts: Lengths, traffic: Traffic, seed: int) -> Lengths:
    if not traffic.output_deviation:
        return outputs
    normal = np.random.default_rng(seed).standard_normal(len(outputs))
    changed = np.rint(outputs * (1 + traffic.output_deviation * normal))
    return np.clip(changed, 1, CONTEXT - prompts).astype(np.int64)


def _pairs(lengths: Lengths) -> Empirical:
    return Empirical(tuple((prompt, output) for prompt, output in lengths.tolist()))
