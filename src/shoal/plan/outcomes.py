"""What became of the requests of a run, request by request, so that two runs can be compared in pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import Request
from shoal.measure import RunRecord
from shoal.measure.summary import normalised, outcome
from shoal.plan.confidence import FloatArray

LATENCY_WEIGHT = 1e-3
"""What a normalised latency of 1 counts beside a goal that was missed. SeaLLM's alpha (equation 6) is 1e-4;
there it breaks ties between services, here between schedulers that all meet nearly every goal."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One number for each request, in the order of their arrival."""

    services: Sequence[str]
    """Whose requests they are."""
    met: FloatArray
    """1: it met its goals, 0: it missed one, NaN: it has none."""
    latency: FloatArray
    """Normalised latency; NaN where it was not answered."""
    ttft_s: FloatArray
    """Time to first token; NaN where it was not answered."""

    def of(self, service: str) -> "Outcomes":
        """Those of one service."""
        own = np.array([name == service for name in self.services], dtype=bool)
        return Outcomes(
            [service] * int(own.sum()), met=self.met[own], latency=self.latency[own], ttft_s=self.ttft_s[own]
        )

    @property
    def attainment(self) -> float:
        """Share of the requests with goals that met them; NaN where there are none."""
        return mean(self.met)

    @property
    def losses(self) -> FloatArray:
        """What a search makes small: missed goals, and a little for latency, which decides without goals."""
        return np.nan_to_num(1.0 - self.met) + LATENCY_WEIGHT * np.nan_to_num(self.latency)

    @property
    def loss(self) -> float:
        """Mean of ``losses``; 0 where there are no requests."""
        return float(self.losses.mean()) if len(self.losses) else 0.0


def outcomes(run: RunRecord, requests: Sequence[Request]) -> Outcomes:
    """The outcomes of ``requests``, all of which the run answered or refused."""
    rows = {row.request_id: row for row in run.requests}
    ordered = [rows[request.id] for request in requests]
    met = [outcome(row) for row in ordered]
    latency = [normalised(row, run) for row in ordered]
    return Outcomes(
        [request.service for request in requests],
        met=np.array([np.nan if each is None else float(each) for each in met]),
        latency=np.array([np.nan if each is None else each for each in latency]),
        ttft_s=np.array([row.ttft_s if row.answered else np.nan for row in ordered]),
    )


def worst(outcomes: Outcomes) -> tuple[str, float]:
    """The service with the lowest attainment, and that; ("", 1) where nobody has goals."""
    found = {name: outcomes.of(name).attainment for name in dict.fromkeys(outcomes.services)}
    known = {name: value for name, value in found.items() if not math.isnan(value)}
    return min(known.items(), key=lambda each: each[1], default=("", 1.0))


def all_missed(requests: Sequence[Request]) -> Outcomes:
    """The outcomes of requests that nobody serves, though they have goals."""
    nothing = np.full(len(requests), np.nan)
    return Outcomes([each.service for each in requests], np.zeros(len(requests)), nothing, nothing)


def mean(values: FloatArray) -> float:
    """Mean of what is not NaN; NaN where nothing is."""
    counted = values[~np.isnan(values)]
    return float(counted.mean()) if len(counted) else float("nan")


def tail(values: FloatArray, percent: float = 99) -> float:
    """Percentile of what is not NaN; NaN where nothing is."""
    counted = values[~np.isnan(values)]
    return float(np.percentile(counted, percent)) if len(counted) else float("nan")
