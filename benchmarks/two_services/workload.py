"""Workload of `benchmarks.two_services`: lengths from a table, Poisson arrivals with bursts, by seed."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SERVICES = ("chat", "write")
"""The two kinds of requests, which may be separate services."""
MIXED = "mixed"
"""The service of both kinds, with --services 1."""

LONGEST_PROMPT, LONGEST_CHAT_PROMPT, LONGEST_TOTAL = 1024, 256, 2048
"""Limits in tokens before scaling; longer conversations, and those below ``SHORTEST``, are left out."""
SHORTEST = 4

CYCLE_S = 10.0
"""Approximate: a run has whole cycles."""
BURST_SHARE, BURST_RATE = 1 / 3, 3.0
"""Each service has one burst per cycle, at a random time, with three times its other rate."""


@dataclass(frozen=True)
class Length:
    """Prompt and output tokens of one conversation."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Arrival:
    """One request; at_s: seconds from the start. output_tokens: its true length."""

    id: str
    service: str
    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def read_lengths(path: Path, scale: float) -> dict[str, list[Length]]:
    """Conversations of each service, shortest output first; groups by 2-means of the output length."""
    with path.open(newline="") as file:
        rows = [Length(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    rows = [
        row
        for row in rows
        if SHORTEST <= row.prompt <= LONGEST_PROMPT
        and row.output >= SHORTEST
        and row.prompt + row.output <= LONGEST_TOTAL
    ]
    border = _between_two_means(np.array([row.output for row in rows]))
    groups = {
        "chat": [row for row in rows if row.output < border and row.prompt <= LONGEST_CHAT_PROMPT],
        "write": [row for row in rows if row.output >= border],
    }
    scaled = {
        name: [Length(max(1, round(row.prompt * scale)), max(1, round(row.output * scale))) for row in group]
        for name, group in groups.items()
    }
    return {name: sorted(group, key=lambda one: (one.output, one.prompt)) for name, group in scaled.items()}


def _between_two_means(values: np.ndarray) -> float:
    """Border between two groups of numbers by Lloyd's algorithm, starting at the quartiles."""
    low, high = np.percentile(values, [25, 75])
    while True:
        border = (low + high) / 2
        means = values[values < border].mean(), values[values >= border].mean()
        if means == (low, high):
            return float(border)
        low, high = means


def typical(lengths: Sequence[Length], count: int) -> list[Length]:
    """``count`` of the lengths, evenly spaced by output, with nearly the mean of all."""
    return [lengths[(2 * i + 1) * len(lengths) // (2 * count)] for i in range(count)]


def mean_output(lengths: Mapping[str, Sequence[Length]], chat_share: float) -> float:
    """Mean output tokens with this share of chats."""
    chat, write = (float(np.mean([one.output for one in lengths[name]])) for name in SERVICES)
    return chat_share * chat + (1 - chat_share) * write


def prompt_of(length: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Random token ids, without common prefixes."""
    return tuple(rng.integers(100, 40_000, length).tolist())


def arrival_times(rate: float, seconds: float, rng: np.random.Generator) -> list[float]:
    """Poisson arrivals with bursts, ``rate`` per second on average.

    A stream of rate 1 is drawn, and its times are mapped by the integral of the burst profile, so that
    another rate has the same stream, scaled.
    """
    quiet = rate / (1 + BURST_SHARE * (BURST_RATE - 1))
    cycles = max(1, round(seconds / CYCLE_S))
    cycle_s = seconds / cycles
    burst_s = BURST_SHARE * cycle_s
    times, expected = [0.0], [0.0]
    for start in np.arange(cycles) * cycle_s:
        place = rng.uniform(0, cycle_s - burst_s)
        for until, speed in (
            (start + place, quiet),
            (start + place + burst_s, quiet * BURST_RATE),
            (start + cycle_s, quiet),
        ):
            expected.append(expected[-1] + (until - times[-1]) * speed)
            times.append(until)
    arrivals = []
    at = rng.exponential()
    while at < expected[-1]:
        arrivals.append(float(np.interp(at, expected, times)))
        at += rng.exponential()
    return arrivals


def service_of(kind: str, services: int) -> str:
    """The service for requests of a kind."""
    return kind if services == len(SERVICES) else MIXED


def make_workload(
    lengths: Mapping[str, Sequence[Length]],
    *,
    rate: float,
    chat_share: float,
    seconds: float,
    seed: int,
    services: int = len(SERVICES),
) -> list[Arrival]:
    """Requests of both kinds in the order of their arrival; ``rate`` per second together.

    services: 2, or 1 for the same requests to one service.
    """
    arrivals: list[Arrival] = []
    for number, (name, share) in enumerate(zip(SERVICES, (chat_share, 1 - chat_share), strict=True)):
        times = arrival_times(rate * share, seconds, np.random.default_rng((seed, number, 0)))
        rng = np.random.default_rng((seed, number, 1))
        for at_s in times:
            one = lengths[name][int(rng.integers(len(lengths[name])))]
            prompt = prompt_of(one.prompt, rng)
            service = service_of(name, services)
            arrivals.append(Arrival(f"{name}-{len(arrivals)}", service, at_s, prompt, one.output))
    return sorted(arrivals, key=lambda one: one.at_s)
