"""Capacity planning (``shoal plan``): search of the cheapest fleet that reaches an SLO attainment."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.place.placement import Placement
from shoal.plan.candidates import scheduler_candidates
from shoal.plan.confidence import Interval, mean_interval
from shoal.plan.demand import Demand, PlacedTrial, Policies, simulate_placed
from shoal.plan.fleet import Fleet, cheapest, cost, pareto, smaller_by_one, within
from shoal.plan.goals import PlanningOptions
from shoal.plan.halving import plan_rounds, successive_halving
from shoal.plan.outcomes import Outcomes, worst_service
from shoal.plan.placing import DISPATCH, Placer, split_for_search
from shoal.plan.trial import Part, split
from shoal.plan.tune import MIN_REQUESTS, Progress
from shoal.simulate.parallel import Workers

DISPATCHES = (DISPATCH, "least-requests", "forecast", "prefix")
"""Dispatch policies to try; the first is the servers' default."""
TUNE_MARGIN = 0.2
"""Other policies are tried on fleets whose attainment is too low by at most this."""
_MAX_TUNED_FLEETS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The best placement and policies found for a fleet."""

    fleet: Fleet
    """Devices; the placement may leave some idle."""
    cost: float
    placement: Placement
    policies: Policies
    outcomes: Outcomes
    """On the requests that are planned for."""
    tuned: bool = False
    """Whether other policies than the default were tried."""

    @property
    def attainment(self) -> float:
        """SLO attainment of the service with the lowest."""
        return worst_service(self.outcomes)[1]


@dataclass(frozen=True, slots=True)
class HeldOutPlan:
    """A plan on the held-out, later requests."""

    plan: FleetPlan
    outcomes: Outcomes
    attainment: Interval
    """SLO attainment of the service with the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning."""

    options: PlanningOptions
    planned: Part
    """The requests that were planned for."""
    held_out: Part
    """The later requests."""
    fleets: Mapping[Fleet, FleetPlan]
    """All fleets that were tried; more devices never attain less."""
    chosen: HeldOutPlan | None
    """The cheapest plan with enough attainment; None: nothing in the catalogue is enough."""
    one_less: Sequence[HeldOutPlan]
    """The chosen fleet with one device less, of each kind that it has."""
    stopped: bool = False
    """Whether planning was interrupted before it chose."""

    @property
    def confirmed(self) -> bool:
        """Whether the chosen plan attained enough on the later requests, too."""
        return self.chosen is not None and self.chosen.attainment.mean >= self.options.attainment

    @property
    def frontier(self) -> list[FleetPlan]:
        """The Pareto frontier of cost and attainment, by cost."""
        points = {fleet: (each.cost, each.attainment) for fleet, each in self.fleets.items()}
        return [self.fleets[fleet] for fleet in pareto(points)]


class Stopped(KeyboardInterrupt):
    """Planning was interrupted; ``found`` has the fleets tried so far."""

    def __init__(self, found: Plan) -> None:
        super().__init__()
        self.found = found


def plan(
    demand: Demand,
    options: PlanningOptions,
    progress: Progress | None = None,
    on_fleet: Callable[[FleetPlan], None] | None = None,
) -> Plan:
    """Search the cheapest fleet, its placement and policies; raises ConfigError for too few requests.

    Fleets are compared with the scenario's policies first. If a cheaper fleet than the one found nearly
    attains enough, other policies are searched for it, so policies change only if that saves devices.
    on_fleet: called for each fleet that was tried. Raises Stopped on Ctrl-C.
    """
    split_for_search(demand, options.share)
    with Workers(demand, options.processes) as workers:
        planner = _Planner(demand, options, workers, progress, on_fleet)
        try:
            return planner.run()
        except KeyboardInterrupt as interrupt:
            raise Stopped(replace(planner.result(), stopped=True)) from interrupt


class _Planner:
    """The state of one search: plans of the fleets tried so far."""

    def __init__(
        self,
        demand: Demand,
        options: PlanningOptions,
        workers: Workers[Demand],
        progress: Progress | None = None,
        on_fleet: Callable[[FleetPlan], None] | None = None,
    ) -> None:
        self._demand, self._options, self._workers = demand, options, workers
        self._progress = progress or (lambda what, done, total: None)
        self._on_fleet = on_fleet or (lambda found: None)
        self._planned, self._held_out = split(len(demand.requests), options.share)
        self._default = Policies(demand.engines.scheduler, DISPATCHES[0])
        self._placer = Placer(demand, self._planned, options.attainment, workers)
        self._fleets: dict[Fleet, FleetPlan] = {}

    def run(self) -> Plan:
        found = self._search()
        if found is not None:
            found = self._best_at_cost(found)
        held_out: list[HeldOutPlan] = []
        if found is not None:
            fewer = [self._best(fleet) for fleet in smaller_by_one(found)]
            held_out = self._evaluate_held_out([self._best(found), *fewer])
        return self.result(held_out)

    def result(self, held_out: Sequence[HeldOutPlan] = ()) -> Plan:
        """The result so far; held_out: the chosen fleet, then those with one device less."""
        return Plan(
            options=self._options,
            planned=self._planned,
            held_out=self._held_out,
            fleets={fleet: self._best(fleet) for fleet in self._fleets},
            chosen=held_out[0] if held_out else None,
            one_less=held_out[1:],
        )

    def _search(self) -> Fleet | None:
        """The cheapest fleet that is enough, after trying other policies on fleets that nearly are."""
        tuned = 0
        while True:
            found = self._cheapest()
            limit = math.inf if found is None else cost(self._demand.stock, found)
            border = [
                each
                for each in self._fleets.values()
                if each.cost < limit
                and not each.tuned
                and self._options.attainment - TUNE_MARGIN <= each.attainment < self._options.attainment
            ]
            if not border or self._options.trials == 1 or tuned == _MAX_TUNED_FLEETS:
                return found
            tuned += 1
            self._tune(max(border, key=lambda each: each.attainment))

    def _cheapest(self) -> Fleet | None:
        """The cheapest fleet that is enough while every fleet with one device less, all tried, is not."""
        stock = self._demand.stock
        found = cheapest(stock, self._is_enough)
        while found is not None:
            # The search for placements is not exact: a fleet may suffice though a larger one seemed not to.
            fewer = [fleet for fleet in smaller_by_one(found) if self._is_enough(fleet)]
            if not fewer:
                return found
            found = min(fewer, key=lambda fleet: cost(stock, fleet))
        return None

    def _best_at_cost(self, found: Fleet) -> Fleet:
        """Of the tried fleets with the cost of ``found``, the one with the highest attainment."""
        price = cost(self._demand.stock, found)
        others = [fleet for fleet, each in self._fleets.items() if each.cost == price]
        return max([found, *others], key=lambda fleet: self._best(fleet).attainment)

    def _is_enough(self, fleet: Fleet) -> bool:
        return self._best(fleet).attainment >= self._options.attainment

    def _best(self, fleet: Fleet) -> FleetPlan:
        """The best plan for a fleet, which may use only a part of its devices."""
        if fleet not in self._fleets:
            self._fleets[fleet] = self._place_fleet(fleet)
            self._on_fleet(self._fleets[fleet])
        own = self._fleets[fleet]
        usable = [each for part, each in self._fleets.items() if within(part, fleet)]
        found = max([own, *usable], key=lambda each: each.attainment)
        return own if found is own else replace(found, fleet=fleet, cost=own.cost)

    def _place_fleet(self, fleet: Fleet) -> FleetPlan:
        """Search a placement on the fleet, and simulate it with the default policies."""
        what = f"trying {self.name_of(fleet)}"
        placement = self._placer.place(fleet, lambda step, done, total: self._progress(what, done, total))
        [found] = self._simulate([PlacedTrial(placement, self._default, self._planned)])
        return FleetPlan(
            fleet=fleet,
            cost=cost(self._demand.stock, fleet),
            placement=placement,
            policies=self._default,
            outcomes=found,
        )

    def name_of(self, fleet: Fleet) -> str:
        return fleet_name(self._demand, fleet)

    def _simulate(self, trials: Sequence[PlacedTrial]) -> list[Outcomes]:
        return self._workers.at_each(simulate_placed, trials)

    def _tune(self, found: FleetPlan) -> None:
        """Search policies for a fleet by successive halving; keep them if they attain more."""
        candidates = self._candidate_policies(found)
        last: dict[Policies, Outcomes] = {}

        def evaluate(policies: Sequence[Policies], share: float) -> Sequence[float]:
            part = self._planned.first(share)
            what = f"{len(policies)} policies on {self.name_of(found.fleet)}, {len(part):,} requests"
            trials = [PlacedTrial(found.placement, each, part) for each in policies]
            outcomes = self._workers.at_each(
                simulate_placed, trials, lambda done, total: self._progress(what, done, total)
            )
            last.clear()
            last.update(zip(policies, outcomes, strict=True))
            return [1 - worst_service(each)[1] + each.loss * 1e-3 for each in outcomes]

        rounds = plan_rounds(len(candidates), MIN_REQUESTS / len(self._planned))
        *_, final = successive_halving(candidates, rounds, evaluate, always=[self._default])
        best = final.candidates[0]
        changed = replace(found, policies=best, outcomes=last[best], tuned=True)
        if changed.attainment > found.attainment:
            self._fleets[found.fleet] = changed
            self._on_fleet(changed)
        else:
            self._fleets[found.fleet] = replace(found, tuned=True)

    def _candidate_policies(self, found: FleetPlan) -> list[Policies]:
        default = self._default
        several = len([group for group in found.placement.groups if group.shares]) > 1
        others = [replace(default, dispatch=name) for name in DISPATCHES[1:]] if several else []
        schedulers = scheduler_candidates(
            default.scheduler,
            self._options.trials,
            self._options.seed,
            slices=self._demand.engines.memory.weights_limit_bytes is None,
        )
        return [default, *others, *(replace(default, scheduler=each) for each in schedulers[1:])]

    def _evaluate_held_out(self, plans: Sequence[FleetPlan]) -> list[HeldOutPlan]:
        self._progress("held-out part", 0, len(plans))
        trials = [PlacedTrial(each.placement, each.policies, self._held_out) for each in plans]
        found = self._simulate(trials)
        return [
            HeldOutPlan(each, outcomes, attainment_interval(outcomes, self._options.seed))
            for each, outcomes in zip(plans, found, strict=True)
        ]


def attainment_interval(outcomes: Outcomes, seed: int) -> Interval:
    """Attainment of the service with the lowest, and its confidence interval."""
    return mean_interval(outcomes.of(worst_service(outcomes)[0]).met, np.random.default_rng(seed))


def fleet_name(demand: Demand, fleet: Fleet) -> str:
    """Such as ``2 a100-80 + 1 l40s``."""
    kinds = demand.catalogue.devices
    return " + ".join(f"{count} {kind.name}" for kind, count in zip(kinds, fleet, strict=True) if count)
