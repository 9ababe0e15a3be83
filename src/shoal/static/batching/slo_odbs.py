"""Batches by latency goal and predicted output length (UELLM, algorithm 1: SLO-ODBS and its two halves)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.core import ConfigError
from shoal.static.batching.filling import Filling
from shoal.static.batching.forming import Forming
from shoal.static.batching.types import StaticBatch, StaticRequest

LENGTH_SHARE = 0.5
"""Weight of the length, beside the goal, in the order in which SLO-ODBS looks at requests."""


class Aim(StrEnum):
    """What requests are compared by; the other of the two counts as the same for all."""

    BOTH = "slo-odbs"
    LENGTH = "odbs"
    SLO = "slo-dbs"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request as it is compared with others."""

    request: StaticRequest
    slo: float
    """Its goal as a multiple of the mean goal; 1 where goals are not compared."""
    length: float
    """Its predicted output as a multiple of the mean; 1 where lengths are not compared."""


class _Batch:
    """A batch being filled, and the maxima over its requests that Algorithm 1 calls L_CM and O_CM."""

    def __init__(self, first: _Candidate, forming: Forming) -> None:
        self.filling = Filling(first.request, forming)
        self.urgent_slo = self.slo = first.slo
        self.length = first.length

    def add(self, candidate: _Candidate) -> None:
        self.filling.add(candidate.request)
        self.slo = max(self.slo, candidate.slo)
        self.urgent_slo = min(self.urgent_slo, candidate.slo)
        self.length = max(self.length, candidate.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOdbs:
    """Looks at requests in order and starts a new batch where the next would cost too much in this one.

    For a request with goal SLO and predicted length l, beside n others whose maxima are L_CM and O_CM:
    T_l = (SLO + L_CM) (n + 1) L1, T_o = |l - O_CM| (n + 1) L2; it joins if w1 T_l + w2 T_o is at most the
    threshold 2 w1 L1 B_max. Goals and lengths are multiples of their running means, so the threshold is what
    a full batch of B_max mean requests reaches, and goals or lengths apart close one sooner. B_max is
    ``max_batch``. A batch whose composite metric CM = w1 L_CM + w2 O_CM exceeds that of mean requests is
    allowed proportionally fewer. All requests must fit in memory; without ``max_batch`` only that counts.
    """

    aim: Aim = Aim.BOTH
    """SLO-ODBS compares both; ODBS counts every goal as the mean; SLO-DBS counts every length as the mean.

    The paper sets a weight to zero, which for ODBS takes the threshold away with it.
    """
    literal: bool = False
    """Algorithm 1 as printed: sorted by goal alone, batches in the order formed, T_o = (l - O_CM) (n + 1) L2.

    A shorter request then makes a batch cheaper. Otherwise ODBS sorts by length, longest first, so that O_CM
    is what the next request is padded to; SLO-DBS by goal; SLO-ODBS by SLO + l / 2; and batches are ordered
    by goal, those of ODBS shortest first.
    """
    latency_weight: float = 1.0
    """w1."""
    length_weight: float = 1.0
    """w2."""
    latency_overhead: float = 1.2
    """L1."""
    length_overhead: float = 1.2
    """L2."""

    def __post_init__(self) -> None:
        """Refuse weights without meaning; raises ConfigError."""
        if not (self.latency_weight > 0 and self.length_weight >= 0):
            raise ConfigError(
                "SLO-ODBS needs latency_weight above 0 (its threshold is a multiple of it) and "
                f"length_weight of at least 0, got {self.latency_weight} and {self.length_weight}"
            )
        if not (self.latency_overhead > 0 and self.length_overhead > 0):
            raise ConfigError(
                f"overheads must be above 0, got {self.latency_overhead} and {self.length_overhead}"
            )

    def form(self, requests: Sequence[StaticRequest], forming: Forming) -> list[StaticBatch]:
        """Most urgent batch first; ODBS: the one with the shortest predictions first."""
        batches: list[_Batch] = []
        for candidate in self._ranked([self._scale(request, forming) for request in requests]):
            if batches and self._may_join(candidate, batches[-1], forming.max_batch):
                batches[-1].add(candidate)
            else:
                batches.append(_Batch(candidate, forming))
        return [batch.filling.close() for batch in self._ordered(batches)]

    def _scale(self, request: StaticRequest, forming: Forming) -> _Candidate:
        slo, length = 1.0, 1.0
        if self.aim is not Aim.LENGTH and request.slo_s is not None:
            slo = request.slo_s / forming.mean_slo_s
        if self.aim is not Aim.SLO:
            length = request.predicted / forming.mean_predicted
        return _Candidate(request, slo, length)

    def _ranked(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        if self.literal or self.aim is Aim.SLO:
            return sorted(candidates, key=lambda candidate: candidate.slo)
        if self.aim is Aim.LENGTH:
            return sorted(candidates, key=lambda candidate: -candidate.length)
        return sorted(candidates, key=lambda candidate: candidate.slo + LENGTH_SHARE * candidate.length)

    def _may_join(self, candidate: _Candidate, batch: _Batch, max_batch: int | None) -> bool:
        if not batch.filling.has_room(candidate.request):
            return False
        if max_batch is None:
            return True
        size = len(batch.filling) + 1
        threshold = 2 * self.latency_weight * self.latency_overhead * max_batch
        return self._cost(candidate, batch, size) <= threshold and size <= self._max_size(
            candidate, batch, max_batch
        )

    def _cost(self, candidate: _Candidate, batch: _Batch, size: int) -> float:
        apart = candidate.length - batch.length
        latency = (candidate.slo + batch.slo) * size * self.latency_overhead
        length = (apart if self.literal else abs(apart)) * size * self.length_overhead
        return self.latency_weight * latency + self.length_weight * length

    def _max_size(self, candidate: _Candidate, batch: _Batch, max_batch: int) -> float:
        """B_max, or fewer for a batch of more than the mean composite metric."""
        composite = self.latency_weight * max(batch.slo, candidate.slo)
        composite += self.length_weight * max(batch.length, candidate.length)
        return max_batch * min(1.0, (self.latency_weight + self.length_weight) / composite)

    def _ordered(self, batches: list[_Batch]) -> list[_Batch]:
        if self.literal:
            return batches
        if self.aim is Aim.LENGTH:
            return sorted(batches, key=lambda batch: batch.length)
        return sorted(batches, key=lambda batch: batch.urgent_slo)
