"""Estimates of device groups by simulating recent traffic on their engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from shoal.core import Request
from shoal.core.slo import met
from shoal.measure import RequestRow, RunRecord
from shoal.place.estimate import ServiceEstimate, added
from shoal.place.placement import GroupShape
from shoal.simulate.parallel import Workers
from shoal.simulate.placed_engines import PlacedEngines
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import OpenLoop
from shoal.simulate.spec import Watch

_NO_SAMPLES = Watch(sample_s=1e6)
_MOST_SHARES = 4
"""Limit on the different samples of requests tried for a group that gets a share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraffic:
    """Engines and the requests of a time window, to simulate."""

    engines: PlacedEngines
    requests: Mapping[str, Sequence[Request]]
    """By service, sorted by arrival."""

    def serve(self, shape: GroupShape) -> Mapping[str, ServiceEstimate]:
        """Simulate one group with its share of every service's requests, evenly spread over the window.

        For small shares the mean of several samples is taken, since each has few requests.
        """
        times = min(_MOST_SHARES, int(1 / max(share for _, share in shape.shares) + 1e-9))
        runs = [self._serve(shape, number / times) for number in range(times)]
        return {
            name: _scaled(added([run[name] for run in runs]), len(self.requests[name]) * share)
            for name, share in shape.shares
        }

    def _serve(self, shape: GroupShape, offset: float) -> Mapping[str, ServiceEstimate]:
        shares = {name: thinned(self.requests[name], share, offset) for name, share in shape.shares}
        source = OpenLoop([request for requests in shares.values() for request in requests])
        record = Simulation(self.engines.engines(shape), source, watch=_NO_SAMPLES).run("group")
        return estimates(record, shape.services)


class SimulatedGroups:
    """A ``GroupModel`` that simulates, in parallel if there are ``workers``."""

    def __init__(self, traffic: GroupTraffic, workers: Workers[GroupTraffic] | None = None) -> None:
        self._traffic = traffic
        self._workers = workers
        self.requests: Mapping[str, int] = {
            name: len(requests) for name, requests in traffic.requests.items()
        }
        """Number of requests by service."""

    def serve(self, shapes: Sequence[GroupShape]) -> Sequence[Mapping[str, ServiceEstimate]]:
        """Simulate each shape; those with most requests start first."""
        if self._workers is None:
            return [self._traffic.serve(shape) for shape in shapes]
        return self._workers.at_each(GroupTraffic.serve, shapes, heaviest_first=self._weight)

    def _weight(self, shape: GroupShape) -> float:
        return sum(self.requests[name] * share for name, share in shape.shares)


def thinned(requests: Sequence[Request], share: float, offset: float = 0.0) -> list[Request]:
    """An evenly spread share of the requests: the n-th is included if n * share passes a whole number.

    offset: in [0, 1), start of the count.
    """
    # Half a request ahead, so that a small share of few requests gets some.
    begin = (offset + 0.5) % 1 + 1e-9
    count = [floor((at + 0.5) * share + begin) for at in range(-1, len(requests))]
    return [
        request
        for request, before, after in zip(requests, count[:-1], count[1:], strict=True)
        if after > before
    ]


def estimates(record: RunRecord, services: Sequence[str]) -> dict[str, ServiceEstimate]:
    return estimates_of_rows(record.requests, services, record.execution_s)


def estimates_of_rows(
    requests: Sequence[RequestRow], services: Sequence[str], execution_s: Mapping[str, float]
) -> dict[str, ServiceEstimate]:
    """Estimates by service; execution_s: L^ of every service with an answered request."""
    rows: dict[str, list[RequestRow]] = {name: [] for name in services}
    for row in requests:
        rows[row.service].append(row)
    return {name: _of_rows(each, execution_s.get(name)) for name, each in rows.items()}


def _of_rows(rows: Sequence[RequestRow], execution_s: float | None) -> ServiceEstimate:
    answered = [row for row in rows if row.answered]
    missed = len(rows) - sum(met(row, row.slo) is not False for row in answered)
    latency_s = sum(row.e2e_s for row in answered)
    return ServiceEstimate(len(rows), missed, len(answered), latency_s / execution_s if execution_s else 0.0)


def _scaled(found: ServiceEstimate, requests: float) -> ServiceEstimate:
    """Scale an estimate to another number of requests; without any, all count as served."""
    if not found.requests:
        return ServiceEstimate(requests, 0.0)
    factor = requests / found.requests
    return ServiceEstimate(
        requests, found.unserved * factor, found.answered * factor, found.latency_sum * factor
    )
