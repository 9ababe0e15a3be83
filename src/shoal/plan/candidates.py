"""Search space of schedulers: orders, admissions and batch limits to try, and candidates drawn from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.schedule import SchedulerOptions
from shoal.schedule.policies.admissions import Aggressive, Conservative, PastFuture, Predicted, Slice
from shoal.schedule.policies.orders import (
    DoublingBudget,
    EarliestDeadline,
    Fcfs,
    FcfsStrict,
    Mlfq,
    RoundRobin,
    ShortestRemaining,
    WeightedTurns,
)

_RESERVES = (0.02, 0.05, 0.1, 0.2)

CHOICES: Mapping[str, Sequence[Any]] = {
    "order": (
        WeightedTurns(),
        Fcfs(),
        FcfsStrict(),
        RoundRobin(),
        Mlfq(),
        DoublingBudget(),
        DoublingBudget(variant="batch"),
        ShortestRemaining(),
        EarliestDeadline(),
    ),
    "admission": (
        *(Aggressive(watermark=watermark) for watermark in (0.8, 0.9, 0.95, 0.99)),
        *(PastFuture(reserved=reserved) for reserved in _RESERVES),
        *(Predicted(reserved=reserved) for reserved in _RESERVES),
        *(Slice(tokens=tokens) for tokens in (32, 128, 512)),
        Conservative(),
        Conservative(overcommit=1.5),
    ),
    "max_running": (None, 16, 64, 256, 1024),
    "max_batched_tokens": (512, 1024, 2048, 4096, 8192),
}
"""Values to try, by field of ``SchedulerOptions``. Left out are ``priority``, since workloads have no
priorities, and policies that know output lengths beforehand."""


def scheduler_candidates(
    default: SchedulerOptions, count: int, seed: int, *, slices: bool = True
) -> list[SchedulerOptions]:
    """``count`` different schedulers: the default, those that differ from it in one field, then random ones.

    If more than ``count`` differ in one field, a random sample of them. Fewer than ``count`` only if there
    are no more. Fields that are not in ``CHOICES`` are the default's. slices: whether admissions may be by
    slices, which need all weights to stay.
    """
    random = np.random.default_rng(seed)
    choices = CHOICES if slices else _without_slices(CHOICES)
    neighbours = [each for each in dict.fromkeys(_neighbours(default, choices)) if each != default]
    if count - 1 < len(neighbours):
        chosen = sorted(random.choice(len(neighbours), count - 1, replace=False).tolist())
        return [default, *(neighbours[index] for index in chosen)]
    found = dict.fromkeys([default, *neighbours])
    for _ in range(50 * count):
        if len(found) >= count:
            break
        drawn = {name: values[int(random.integers(len(values)))] for name, values in choices.items()}
        found.setdefault(replace(default, **drawn))
    return list(found)


def _without_slices(choices: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    return {**choices, "admission": [each for each in choices["admission"] if each.slice_tokens is None]}


def _neighbours(
    default: SchedulerOptions, choices: Mapping[str, Sequence[Any]]
) -> Iterator[SchedulerOptions]:
    for name, values in choices.items():
        for value in values:
            yield replace(default, **{name: value})
