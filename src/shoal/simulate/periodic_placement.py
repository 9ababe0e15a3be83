"""Serving with a new placement after every interval (SeaLLM, section 4.3), decided as in a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cluster.placing.controller import PlacementController
from shoal.core import Request
from shoal.place.estimate import Estimate, Found
from shoal.place.placement import Placement
from shoal.place.re_placement import Hysteresis, IntervalRule
from shoal.simulate.changing_placement import ChangingCluster
from shoal.simulate.simulated_groups import estimates_of_rows

Placer = Callable[[Sequence[Request], float, Placement], tuple[Found, Estimate]]
"""Takes the last interval's requests (on the cluster's clock), its length in seconds and the present
placement.

Returns a new placement with its estimate, and the estimate of the present one, both for these requests.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval with a placement."""

    begin_s: float
    length_s: float
    estimated: Estimate
    achieved: Estimate
    """Result of the requests that ended in it."""
    changed: bool
    """Whether the placement changed after it."""
    load_bytes: int
    """Weights loaded for that."""


def serve_replacing(
    cluster: ChangingCluster,
    requests: Sequence[Request],
    placer: Placer,
    estimated: Estimate,
    rule: IntervalRule,
    hysteresis: Hysteresis | None = None,
) -> list[Interval]:
    """Serve all requests, with a new placement after every interval until the last arrival.

    requests: those of the cluster. estimated: of the cluster's first placement. hysteresis: decides whether
    to change; None: always change, as in Eq. 8.
    """
    end_s = max((request.arrival_ns for request in requests), default=0) / 1e9
    services = tuple(cluster.services)
    found: list[Interval] = []
    controller = PlacementController(rule, hysteresis, estimated)
    while cluster.now_s + controller.interval_s < end_s:
        begin_s, ended, length_s = cluster.now_s, len(cluster.rows), controller.interval_s
        cluster.run(begin_s + length_s)
        achieved = Estimate(estimates_of_rows(cluster.rows[ended:], services, cluster.execution_s))
        recent = _between(requests, begin_s, cluster.now_s)
        new, present = placer(recent, length_s, cluster.placement)
        decision = controller.decide(achieved, present, new.estimate)
        load_bytes = cluster.change(new.placement).load_bytes if decision.changes else 0
        assert decision.estimated is not None
        found.append(
            Interval(
                begin_s=begin_s,
                length_s=length_s,
                estimated=decision.estimated,
                achieved=achieved,
                changed=decision.changes,
                load_bytes=load_bytes,
            )
        )
    cluster.run()
    return found


def _between(requests: Sequence[Request], begin_s: float, end_s: float) -> list[Request]:
    return [request for request in requests if begin_s * 1e9 <= request.arrival_ns < end_s * 1e9]
