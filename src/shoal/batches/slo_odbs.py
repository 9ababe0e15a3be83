"""Batch formers by latency goal and predicted length (UELLM, algorithm 1: SLO-ODBS, ODBS, SLO-DBS)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.batches.forming import FormingContext
from shoal.batches.partial_batch import PartialBatch
from shoal.batches.requests import PooledRequest, RequestBatch
from shoal.core import ConfigError

LENGTH_SHARE = 0.5
"""Weight of the length relative to the goal in SLO-ODBS' order of requests."""


class Aim(StrEnum):
    """Whether requests are compared by goal, by length, or by both; the other is taken as the mean."""

    BOTH = "slo-odbs"
    LENGTH = "odbs"
    SLO = "slo-dbs"


class Reading(StrEnum):
    """What is computed; the paper's algorithm and its equations differ.

    In both of the paper's, requests are sorted by goal alone, batches stay in the order in which they were
    formed, and CM = w1 O_CM + w2 L_CM, with the weights the other way round.
    """

    OURS = "ours"
    """T_o = |l - O_CM| (n + 1) L2, so that different lengths make a batch costly."""
    ALGORITHM = "algorithm"
    """T_o = (l - O_CM) (n + 1) L2, as in Algorithm 1: a shorter request makes a batch cheaper."""
    EQUATIONS = "equations"
    """T_o = (l + O_CM) (n + 1) L2, as in Eq. 2: long requests make a batch costly, beside any others."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request with its scaled goal and length."""

    request: PooledRequest
    slo: float
    """Goal as a multiple of the mean goal; 1 if goals are not compared."""
    length: float
    """Predicted output as a multiple of the mean; 1 if lengths are not compared."""


class _Batch:
    """A partial batch, with the maxima over its requests (L_CM and O_CM in Algorithm 1)."""

    def __init__(self, first: _Candidate, context: FormingContext) -> None:
        self.partial = PartialBatch(first.request, context)
        self.urgent_slo = self.slo = first.slo
        self.length = first.length

    def add(self, candidate: _Candidate) -> None:
        self.partial.add(candidate.request)
        self.slo = max(self.slo, candidate.slo)
        self.urgent_slo = min(self.urgent_slo, candidate.slo)
        self.length = max(self.length, candidate.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOdbs:
    """Takes requests in order and starts a new batch when the next one would cost too much in this batch.

    For a request with goal SLO and predicted length l, and a batch of n requests with maxima L_CM and O_CM:
    T_l = (SLO + L_CM) (n + 1) L1, T_o by the ``reading``; it joins if w1 T_l + w2 T_o is at most the
    threshold. Goals and lengths are multiples of their running means. B_max is ``max_batch``. A batch with
    composite metric CM = w1 L_CM + w2 O_CM above that of mean requests may have proportionally fewer. All
    requests must fit in memory; without ``max_batch`` only that counts.

    Raises ConfigError for weights out of range.
    """

    aim: Aim = Aim.BOTH
    """SLO-ODBS compares both; ODBS takes every goal as the mean; SLO-DBS takes every length as the mean.

    The paper sets a weight to zero instead, which for ODBS would remove the threshold.
    """
    reading: Reading = Reading.OURS
    """In ours, ODBS sorts by length, longest first, so that the next request is padded to O_CM; SLO-DBS by
    goal; SLO-ODBS by SLO + l / 2. Batches are ordered by goal, those of ODBS shortest first.
    """
    threshold: float | None = None
    """Limit on w1 T_l + w2 T_o. None: what a full batch of B_max mean requests comes to, so that different
    goals or lengths reach it earlier."""
    latency_weight: float = 1.0
    """w1."""
    length_weight: float = 1.0
    """w2."""
    latency_overhead: float = 1.2
    """L1."""
    length_overhead: float = 1.2
    """L2."""

    def __post_init__(self) -> None:
        if not (self.latency_weight >= 0 and self.length_weight >= 0):
            raise ConfigError(
                f"weights of SLO-ODBS must be at least 0, got {self.latency_weight} and {self.length_weight}"
            )
        if self.threshold is not None and not self.threshold > 0:
            raise ConfigError(f"threshold of SLO-ODBS must be above 0, got {self.threshold}")
        if self.threshold is None and not self._cost_of_means(1) > 0:
            raise ConfigError(
                "with these weights a batch of mean requests costs nothing, so SLO-ODBS needs a threshold"
            )
        if not (self.latency_overhead > 0 and self.length_overhead > 0):
            raise ConfigError(
                f"overheads must be above 0, got {self.latency_overhead} and {self.length_overhead}"
            )

    def form(self, requests: Sequence[PooledRequest], context: FormingContext) -> list[RequestBatch]:
        """Most urgent batch first; ODBS: shortest predictions first."""
        batches: list[_Batch] = []
        for candidate in self._ranked([self._scale(request, context) for request in requests]):
            if batches and self._may_join(candidate, batches[-1], context.max_batch):
                batches[-1].add(candidate)
            else:
                batches.append(_Batch(candidate, context))
        return [batch.partial.to_batch() for batch in self._ordered(batches)]

    def _scale(self, request: PooledRequest, context: FormingContext) -> _Candidate:
        slo, length = 1.0, 1.0
        if self.aim is not Aim.LENGTH and request.slo_s is not None:
            slo = request.slo_s / context.mean_slo_s
        if self.aim is not Aim.SLO:
            length = request.predicted / context.mean_predicted
        return _Candidate(request, slo, length)

    def _ranked(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        if self.reading is not Reading.OURS or self.aim is Aim.SLO:
            return sorted(candidates, key=lambda candidate: candidate.slo)
        if self.aim is Aim.LENGTH:
            return sorted(candidates, key=lambda candidate: -candidate.length)
        return sorted(candidates, key=lambda candidate: candidate.slo + LENGTH_SHARE * candidate.length)

    def _may_join(self, candidate: _Candidate, batch: _Batch, max_batch: int | None) -> bool:
        if not batch.partial.has_room(candidate.request):
            return False
        if max_batch is None:
            return True
        size = len(batch.partial) + 1
        threshold = self._cost_of_means(max_batch) if self.threshold is None else self.threshold
        cost = self._cost(candidate.slo, batch.slo, candidate.length, batch.length, size)
        return cost <= threshold and size <= self._max_size(candidate, batch, max_batch)

    def _cost_of_means(self, size: int) -> float:
        return self._cost(1.0, 1.0, 1.0, 1.0, size)

    def _cost(self, slo: float, largest_slo: float, length: float, longest: float, size: int) -> float:
        """w1 T_l + w2 T_o of a request that would make a batch of ``size``."""
        apart = length + longest if self.reading is Reading.EQUATIONS else length - longest
        if self.reading is Reading.OURS:
            apart = abs(apart)
        latency = (slo + largest_slo) * size * self.latency_overhead
        return self.latency_weight * latency + self.length_weight * apart * size * self.length_overhead

    def _max_size(self, candidate: _Candidate, batch: _Batch, max_batch: int) -> float:
        """B_max, or less for a batch above the mean composite metric."""
        of_slo, of_length = self.latency_weight, self.length_weight
        if self.reading is not Reading.OURS:
            of_slo, of_length = of_length, of_slo
        composite = of_slo * max(batch.slo, candidate.slo) + of_length * max(batch.length, candidate.length)
        mean = of_slo + of_length
        return max_batch if composite <= mean else max_batch * mean / composite

    def _ordered(self, batches: list[_Batch]) -> list[_Batch]:
        if self.reading is not Reading.OURS:
            return batches
        if self.aim is Aim.LENGTH:
            return sorted(batches, key=lambda batch: batch.length)
        return sorted(batches, key=lambda batch: batch.urgent_slo)
