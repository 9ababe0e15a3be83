"""Outcomes of a run by request: goals met, normalised latency, TTFT; the loss that searches minimise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import Request
from shoal.measure import RunRecord
from shoal.measure.summary import met_goals, normalised_latency_of
from shoal.plan.confidence import FloatArray

LATENCY_WEIGHT = 1e-3
"""Weight of normalised latency in the loss; a missed goal counts 1. SeaLLM's alpha (equation 6) is 1e-4;
there it breaks ties between services, here between schedulers that all meet nearly every goal."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One value per request, by arrival, so that two runs can be compared in pairs."""

    services: Sequence[str]
    met: FloatArray
    """1: the request met its goals, 0: it missed one, NaN: it has no goals."""
    latency: FloatArray
    """Normalised latency; NaN if not answered."""
    ttft_s: FloatArray
    """NaN if not answered."""

    def of(self, service: str) -> "Outcomes":
        """The requests of one service."""
        own = np.array([name == service for name in self.services], dtype=bool)
        return Outcomes(
            [service] * int(own.sum()), met=self.met[own], latency=self.latency[own], ttft_s=self.ttft_s[own]
        )

    @property
    def attainment(self) -> float:
        """Share of the requests with goals that met them; NaN if there are none."""
        return mean(self.met)

    @property
    def losses(self) -> FloatArray:
        """Loss of each request: missed goals, and a small term for latency, which decides without goals."""
        return np.nan_to_num(1.0 - self.met) + LATENCY_WEIGHT * np.nan_to_num(self.latency)

    @property
    def loss(self) -> float:
        """Mean of ``losses``; 0 without requests."""
        return float(self.losses.mean()) if len(self.losses) else 0.0


def outcomes(run: RunRecord, requests: Sequence[Request]) -> Outcomes:
    """The outcomes of ``requests``, all of which ended in the run."""
    rows = {row.request_id: row for row in run.requests}
    ordered = [rows[request.id] for request in requests]
    met = [met_goals(row) for row in ordered]
    latency = [normalised_latency_of(row, run) for row in ordered]
    return Outcomes(
        [request.service for request in requests],
        met=np.array([np.nan if each is None else float(each) for each in met]),
        latency=np.array([np.nan if each is None else each for each in latency]),
        ttft_s=np.array([row.ttft_s if row.answered else np.nan for row in ordered]),
    )


def worst_service(outcomes: Outcomes) -> tuple[str, float]:
    """The service with the lowest attainment, and its attainment; ("", 1) without goals."""
    found = {name: outcomes.of(name).attainment for name in dict.fromkeys(outcomes.services)}
    known = {name: value for name, value in found.items() if not math.isnan(value)}
    return min(known.items(), key=lambda each: each[1], default=("", 1.0))


def all_missed(requests: Sequence[Request]) -> Outcomes:
    """The outcomes of requests that no engine can serve."""
    nothing = np.full(len(requests), np.nan)
    return Outcomes([each.service for each in requests], np.zeros(len(requests)), nothing, nothing)


def mean(values: FloatArray) -> float:
    """Mean without NaN; NaN if there is nothing else."""
    counted = values[~np.isnan(values)]
    return float(counted.mean()) if len(counted) else float("nan")


def tail(values: FloatArray, percent: float = 99) -> float:
    """Percentile without NaN; NaN if there is nothing else."""
    counted = values[~np.isnan(values)]
    return float(np.percentile(counted, percent)) if len(counted) else float("nan")
