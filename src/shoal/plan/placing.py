"""Placing: the devices are given, and which services share which of them is sought."""

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
from shoal.plan.goals import Wanted
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part, split
from shoal.plan.tune import LEAST_REQUESTS, Progress
from shoal.simulate.parallel import Workers

DISPATCH = "max-min"
"""Between engines, where nothing else is written: the servers' default."""
FOUND = "placed"
"""What a search found."""
EVERYWHERE = "all on each"
"""Every service on every device: what a server does where nothing is written."""
APART = "each apart"
"""Every service on devices of its own: nothing is shared."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement to be judged."""

    name: str
    """What it is called."""
    placement: Placement
    """Which services share which devices."""
    policies: Policies
    """How they are served."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A placement on the part that the search has not seen."""

    candidate: Candidate
    """The placement."""
    outcomes: Outcomes
    """Of the requests of that part."""
    attainment: Interval
    """Share of its requests that met their goals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What placing came to."""

    searched: Part
    """The requests that were placed for."""
    held_out: Part
    """The later ones."""
    found: Judged
    """What the search found."""
    others: Sequence[Judged]
    """What it is compared with."""
    idle: Sequence[str]
    """Devices that it leaves without services."""
    no_room: Sequence[str]
    """What it is not compared with, since there is no room for that."""


class Placer:
    """Finds the best placement on a fleet, for a part of the workload.

    attainment: share of the requests of every service that are to meet their goals, before more of one
    service count for another.
    """

    def __init__(self, demand: Demand, part: Part, attainment: float, workers: Workers[Demand]) -> None:
        self._demand = demand
        self._objective = Objective(floor=attainment)
        self._traffic = demand.traffic(part)
        self._evaluator = GroupwiseEvaluator(_Groups(demand, part, workers))
        self._screen = GroupwiseEvaluator(demand.screen(self._traffic))

    def place(self, fleet: Fleet, progress: Progress) -> Placement:
        """The best that is found; one without services where some have no room on any device."""
        problem = self._problem(fleet)
        try:
            problem.memory.require(problem.cluster)
        except ConfigError:
            return Placement(())
        return search_screened(problem, self._screen, self._evaluator, progress).placement

    def apart(self, fleet: Fleet) -> Placement | None:
        """Every service on devices of its own, about as many each; None: there are too few."""
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
        """Every service on every device; None: there is no room for that."""
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
    """A ``GroupModel`` that simulates in other processes."""

    def __init__(self, demand: Demand, part: Part, workers: Workers[Demand]) -> None:
        self._part, self._workers = part, workers
        self.requests = {name: len(own) for name, own in demand.traffic(part).requests.items()}
        """Requests of each service."""

    def serve(self, shapes: Sequence[GroupShape]) -> Sequence[Mapping[str, ServiceEstimate]]:
        """Simulate each."""
        return self._workers.at_each(_serve_group, [(self._part, shape) for shape in shapes])


def _serve_group(demand: Demand, wanted: tuple[Part, GroupShape]) -> Mapping[str, ServiceEstimate]:
    part, shape = wanted
    return demand.traffic(part).serve(shape)


def place(
    demand: Demand, wanted: Wanted, written: Sequence[Candidate] = (), progress: Progress | None = None
) -> Placed:
    """Search the best placement on all devices of the catalogue, and simulate it on later requests.

    written: placements that are simulated beside it. Raises ConfigError for too few requests, and where a
    service has no room on any device.
    """
    searched, held_out = split_for_search(demand, wanted.share)
    tell = progress or (lambda what, done, total: None)
    fleet = whole_fleet(demand)
    demand.engines.memory.require(demand.cluster(fleet))
    policies = Policies(demand.engines.scheduler, DISPATCH)
    with Workers(demand, wanted.processes) as workers:
        placer = Placer(demand, searched, wanted.attainment, workers)
        found = placer.place(fleet, lambda step, done, total: tell("search", done, total))
        usual = {FOUND: found, EVERYWHERE: placer.everywhere(fleet), APART: placer.apart(fleet)}
        candidates = [Candidate(name, each, policies) for name, each in usual.items() if each is not None]
        candidates += written
        trials = [PlacedTrial(each.placement, each.policies, held_out) for each in candidates]
        outcomes = workers.at_each(simulate_placed, trials, partial(tell, "held-out part"))
    judged = [
        Judged(each, those, mean_interval(those.met, np.random.default_rng(wanted.seed)))
        for each, those in zip(candidates, outcomes, strict=True)
    ]
    used = {device.name for group in found.groups if group.shares for device in group.devices}
    return Placed(
        searched=searched,
        held_out=held_out,
        found=judged[0],
        others=judged[1:],
        idle=[device.name for device in demand.cluster(fleet).devices if device.name not in used],
        no_room=[name for name, each in usual.items() if each is None],
    )


def whole_fleet(demand: Demand) -> Fleet:
    """All devices of the catalogue."""
    return tuple(kind.most for kind in demand.catalogue.devices)


def split_for_search(demand: Demand, share: float) -> tuple[Part, Part]:
    """The part of a workload to search on, and the later one.

    Raises ConfigError for too few requests, and for a service without any in the part to search on.
    """
    least = 2 * LEAST_REQUESTS
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
