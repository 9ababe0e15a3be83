"""Placing (``shoal place``): search of the best placement of services on given devices, by simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.core import ConfigError
from shoal.core.cluster import Device
from shoal.place.estimate import Objective, ServiceEstimate
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.placement import GroupShape, Placement
from shoal.place.problem import Problem
from shoal.place.search import search_screened
from shoal.plan.confidence import Interval, mean_interval
from shoal.plan.demand import Demand, PlacedTrial, Policies, simulate_placed
from shoal.plan.fleet import Fleet
from shoal.plan.goals import PlanningOptions
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part, split
from shoal.plan.tune import MIN_REQUESTS, Progress
from shoal.simulate.parallel import Workers

DISPATCH = "max-min"
"""The servers' default dispatch policy."""
FOUND = "placed"
"""Name of the placement that the search found."""
EVERYWHERE = "all on each"
"""Name of the placement of every service on every device, the servers' default."""
SEPARATE = "each apart"
"""Name of the placement of every service on devices of its own."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named placement with its policies."""

    name: str
    placement: Placement
    policies: Policies


@dataclass(frozen=True, slots=True)
class HeldOutPlacement:
    """A placement on the held-out, later requests."""

    candidate: Candidate
    outcomes: Outcomes
    attainment: Interval
    """Share of the requests that met their goals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingResult:
    """The placement that was found, and others for comparison."""

    searched: Part
    """The requests of the search."""
    held_out: Part
    """The later requests."""
    found: HeldOutPlacement
    others: Sequence[HeldOutPlacement]
    idle: Sequence[str]
    """Devices without services in ``found``."""
    no_room: Sequence[str]
    """Names of placements that are not compared, since they do not fit into memory."""


class Placer:
    """Finds the best placement on a fleet, for a part of the workload.

    attainment: required attainment of every service; only above it may one service gain at another's cost.
    """

    def __init__(self, demand: Demand, part: Part, attainment: float, workers: Workers[Demand]) -> None:
        self._demand = demand
        self._objective = Objective(floor=attainment)
        self._traffic = demand.traffic(part)
        self._evaluator = GroupwiseEvaluator(_Groups(demand, part, workers))
        self._screen = GroupwiseEvaluator(demand.screen(self._traffic))

    def place(self, fleet: Fleet, progress: Progress) -> Placement:
        """The best placement found; an empty one if a service does not fit on any device."""
        problem = self._problem(fleet)
        try:
            problem.memory.require(problem.cluster)
        except ConfigError:
            return Placement(())
        return search_screened(problem, self._screen, self._evaluator, progress).placement

    def separate(self, fleet: Fleet) -> Placement | None:
        """Every service on devices of its own, about equally many; None if there are too few devices."""
        problem = self._problem(fleet)
        own: dict[str, list[Device]] = {name: [] for name in problem.rates}
        for device in problem.cluster.devices:
            fitting = [name for name in own if problem.fits([name], [device])]
            if fitting:
                own[min(fitting, key=lambda name: len(own[name]))].append(device)
        if not all(own.values()):
            return None
        return Placement.sharing([([device], [name]) for name, devices in own.items() for device in devices])

    def everywhere(self, fleet: Fleet) -> Placement | None:
        """Every service on every device; None if they do not fit."""
        problem = self._problem(fleet)
        devices, names = problem.cluster.devices, list(problem.rates)
        if not all(problem.fits(names, [device]) for device in devices):
            return None
        return Placement.sharing([([device], names) for device in devices])

    def _problem(self, fleet: Fleet) -> Problem:
        requests = self._traffic.requests
        return Problem(
            cluster=self._demand.cluster(fleet),
            memory=self._demand.engines.memory,
            rates={name: float(len(own)) for name, own in requests.items()},
            max_services=len(requests),
            objective=self._objective,
        )


class _Groups:
    """A ``GroupModel`` that simulates groups in worker processes."""

    def __init__(self, demand: Demand, part: Part, workers: Workers[Demand]) -> None:
        self._part, self._workers = part, workers
        self.requests = {name: len(own) for name, own in demand.traffic(part).requests.items()}
        """Number of requests of each service."""

    def serve(self, shapes: Sequence[GroupShape]) -> Sequence[Mapping[str, ServiceEstimate]]:
        return self._workers.at_each(_serve_group, [(self._part, shape) for shape in shapes])


def _serve_group(demand: Demand, task: tuple[Part, GroupShape]) -> Mapping[str, ServiceEstimate]:
    part, shape = task
    return demand.traffic(part).serve(shape)


def place(
    demand: Demand,
    options: PlanningOptions,
    others: Sequence[Candidate] = (),
    progress: Progress | None = None,
) -> PlacingResult:
    """Search the best placement on all devices of the catalogue, and simulate it on later requests.

    others: placements to compare it with. Raises ConfigError for too few requests, and for a service that
    does not fit on any device.
    """
    searched, held_out = split_for_search(demand, options.share)
    report = progress or (lambda what, done, total: None)
    fleet = whole_fleet(demand)
    demand.engines.memory.require(demand.cluster(fleet))
    policies = Policies(demand.engines.scheduler, DISPATCH)
    with Workers(demand, options.processes) as workers:
        placer = Placer(demand, searched, options.attainment, workers)
        found = placer.place(fleet, lambda step, done, total: report("search", done, total))
        standard = {FOUND: found, EVERYWHERE: placer.everywhere(fleet), SEPARATE: placer.separate(fleet)}
        candidates = [Candidate(name, each, policies) for name, each in standard.items() if each is not None]
        candidates += others
        trials = [PlacedTrial(each.placement, each.policies, held_out) for each in candidates]
        outcomes = workers.at_each(simulate_placed, trials, partial(report, "held-out part"))
    results = [
        HeldOutPlacement(each, those, mean_interval(those.met, np.random.default_rng(options.seed)))
        for each, those in zip(candidates, outcomes, strict=True)
    ]
    used = {device.name for group in found.groups if group.shares for device in group.devices}
    return PlacingResult(
        searched=searched,
        held_out=held_out,
        found=results[0],
        others=results[1:],
        idle=[device.name for device in demand.cluster(fleet).devices if device.name not in used],
        no_room=[name for name, each in standard.items() if each is None],
    )


def whole_fleet(demand: Demand) -> Fleet:
    """All devices of the catalogue."""
    return tuple(kind.most for kind in demand.catalogue.devices)


def split_for_search(demand: Demand, share: float) -> tuple[Part, Part]:
    """The part of the workload to search on, and the held-out, later part.

    Raises ConfigError for too few requests, and for a service without requests in the part to search on.
    """
    least = 2 * MIN_REQUESTS
    if len(demand.requests) < least:
        raise ConfigError(f"planning needs at least {least} requests, got {len(demand.requests)}")
    searched, held_out = split(len(demand.requests), share)
    present = {request.service for request in demand.requests[searched.start : searched.stop]}
    for service in demand.services:
        if service.name not in present:
            raise ConfigError(
                f"service {service.name} has none of the {len(searched):,} requests that are planned for, so "
                "nothing says what it needs: plan with more requests, or leave the service out"
            )
    return searched, held_out
