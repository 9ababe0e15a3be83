"""Planning: the cheapest devices, and what to do with them, that keep the attainment asked for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.place.placement import Placement
from shoal.plan.candidates import scheduler_candidates
from shoal.plan.confidence import Interval, mean_interval
from shoal.plan.demand import Demand, PlacedTrial, Policies, simulate_placed
from shoal.plan.fleet import Fleet, cheapest, cost, pareto, smaller_by_one, within
from shoal.plan.goals import Wanted
from shoal.plan.halving import rounds_of, successive_halving
from shoal.plan.outcomes import Outcomes, worst
from shoal.plan.placing import DISPATCH, Placer, split_for_search
from shoal.plan.trial import Part, split
from shoal.plan.tune import LEAST_REQUESTS, Progress
from shoal.simulate.parallel import Workers

DISPATCHES = (DISPATCH, "least-requests", "forecast", "prefix")
"""Tried between engines; the first is the servers' default."""
REACH = 0.2
"""Other policies are tried on fleets that lack at most so much of the attainment."""
_TUNINGS = 4
"""On how many fleets, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The best that was found for a fleet."""

    fleet: Fleet
    """Its devices; the placement may leave some idle."""
    cost: float
    """Their price."""
    placement: Placement
    """Which services share which devices."""
    policies: Policies
    """How they are served."""
    outcomes: Outcomes
    """On the part of the workload that is planned for."""
    tuned: bool = False
    """Whether other policies were tried, too."""

    @property
    def attainment(self) -> float:
        """Of the service that fares worst."""
        return worst(self.outcomes)[1]


@dataclass(frozen=True, slots=True)
class Later:
    """A plan on the part that was held out."""

    offer: Offer
    """The plan."""
    outcomes: Outcomes
    """Of the later requests."""
    attainment: Interval
    """Of the service that fares worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What planning came to."""

    wanted: Wanted
    """What was asked for."""
    planned: Part
    """The requests that were planned for."""
    held_out: Part
    """The later ones."""
    offers: Mapping[Fleet, Offer]
    """Of every fleet that was looked at; more devices never attain less."""
    chosen: Later | None
    """The cheapest that is enough; None: nothing in the catalogue is."""
    one_less: Sequence[Later]
    """The same with one device less, of each kind that it has."""
    stopped: bool = False
    """Whether planning was interrupted before it chose."""

    @property
    def frontier(self) -> list[Offer]:
        """Offers than which none is cheaper and attains as much, by cost."""
        points = {fleet: (offer.cost, offer.attainment) for fleet, offer in self.offers.items()}
        return [self.offers[fleet] for fleet in pareto(points)]


class Stopped(KeyboardInterrupt):
    """Planning was interrupted; ``found`` has what was tried until then."""

    def __init__(self, found: Plan) -> None:
        super().__init__()
        self.found = found


def plan(
    demand: Demand,
    wanted: Wanted,
    progress: Progress | None = None,
    on_offer: Callable[[Offer], None] | None = None,
) -> Plan:
    """Search the cheapest fleet, its placement and policies; raises ConfigError for too few requests.

    Fleets are compared with the scenario's policies first. Where a cheaper fleet than the one found nearly
    attains enough, other policies are searched for it; so policies change only where that saves devices.
    on_offer: told of each fleet that was tried. Raises Stopped where Ctrl-C ends it.
    """
    split_for_search(demand, wanted.share)
    with Workers(demand, wanted.processes) as workers:
        planner = _Planner(demand, wanted, workers, progress, on_offer)
        try:
            return planner.run()
        except KeyboardInterrupt as interrupt:
            raise Stopped(replace(planner.tried(), stopped=True)) from interrupt


class _Planner:
    """The offers so far, and how to get more."""

    def __init__(
        self,
        demand: Demand,
        wanted: Wanted,
        workers: Workers[Demand],
        progress: Progress | None = None,
        on_offer: Callable[[Offer], None] | None = None,
    ) -> None:
        self._demand, self._wanted, self._workers = demand, wanted, workers
        self._progress = progress or (lambda what, done, total: None)
        self._on_offer = on_offer or (lambda offer: None)
        self._planned, self._held_out = split(len(demand.requests), wanted.share)
        self._default = Policies(demand.engines.scheduler, DISPATCHES[0])
        self._placer = Placer(demand, self._planned, wanted.attainment, workers)
        self._offers: dict[Fleet, Offer] = {}

    def run(self) -> Plan:
        """Search; returns the plan."""
        found = self._search()
        if found is not None:
            found = self._surest_for(found)
        later: list[Later] = []
        if found is not None:
            fewer = [self._best(fleet) for fleet in smaller_by_one(found)]
            later = self._later([self._best(found), *fewer])
        return self.tried(later)

    def tried(self, later: Sequence[Later] = ()) -> Plan:
        """What was found so far; later: the chosen fleet and its smaller ones on the part held out."""
        return Plan(
            wanted=self._wanted,
            planned=self._planned,
            held_out=self._held_out,
            offers={fleet: self._best(fleet) for fleet in self._offers},
            chosen=later[0] if later else None,
            one_less=later[1:],
        )

    def _search(self) -> Fleet | None:
        """The cheapest fleet that is enough, after other policies were tried on those that nearly are."""
        tuned = 0
        while True:
            found = self._cheapest()
            limit = math.inf if found is None else cost(self._demand.stock, found)
            border = [
                offer
                for offer in self._offers.values()
                if offer.cost < limit
                and not offer.tuned
                and self._wanted.attainment - REACH <= offer.attainment < self._wanted.attainment
            ]
            if not border or self._wanted.trials == 1 or tuned == _TUNINGS:
                return found
            tuned += 1
            self._tune(max(border, key=lambda offer: offer.attainment))

    def _cheapest(self) -> Fleet | None:
        """The cheapest fleet that is enough, and of which no device less is; all of those are tried."""
        stock = self._demand.stock
        found = cheapest(stock, self._enough)
        while found is not None:
            # Placements are searched, so that a fleet may prove enough though a larger one seemed not to be.
            fewer = [fleet for fleet in smaller_by_one(found) if self._enough(fleet)]
            if not fewer:
                return found
            found = min(fewer, key=lambda fleet: cost(stock, fleet))
        return None

    def _surest_for(self, found: Fleet) -> Fleet:
        """Of the fleets that were tried and cost what ``found`` does, the one that attains most."""
        price = cost(self._demand.stock, found)
        others = [fleet for fleet, offer in self._offers.items() if offer.cost == price]
        return max([found, *others], key=lambda fleet: self._best(fleet).attainment)

    def _enough(self, fleet: Fleet) -> bool:
        return self._best(fleet).attainment >= self._wanted.attainment

    def _best(self, fleet: Fleet) -> Offer:
        """The best offer for a fleet: what serves well on some of its devices does so on all."""
        if fleet not in self._offers:
            self._offers[fleet] = self._offer(fleet)
            self._on_offer(self._offers[fleet])
        own = self._offers[fleet]
        usable = [offer for known, offer in self._offers.items() if within(known, fleet)]
        found = max([own, *usable], key=lambda offer: offer.attainment)
        return own if found is own else replace(found, fleet=fleet, cost=own.cost)

    def _offer(self, fleet: Fleet) -> Offer:
        """Place the services on the fleet, and simulate that."""
        what = f"trying {self.name_of(fleet)}"
        placement = self._placer.place(fleet, lambda step, done, total: self._progress(what, done, total))
        [found] = self._simulate([PlacedTrial(placement, self._default, self._planned)])
        return Offer(
            fleet=fleet,
            cost=cost(self._demand.stock, fleet),
            placement=placement,
            policies=self._default,
            outcomes=found,
        )

    def name_of(self, fleet: Fleet) -> str:
        """``2 a100-80 + 1 l40s``."""
        return fleet_name(self._demand, fleet)

    def _simulate(self, trials: Sequence[PlacedTrial]) -> list[Outcomes]:
        return self._workers.at_each(simulate_placed, trials)

    def _tune(self, offer: Offer) -> None:
        """Search policies for an offer, by successive halving; keep them where they attain more."""
        candidates = self._policies(offer)
        last: dict[Policies, Outcomes] = {}

        def evaluate(policies: Sequence[Policies], share: float) -> Sequence[float]:
            part = self._planned.first(share)
            what = f"{len(policies)} policies on {self.name_of(offer.fleet)}, {len(part):,} requests"
            trials = [PlacedTrial(offer.placement, each, part) for each in policies]
            found = self._workers.at_each(
                simulate_placed, trials, lambda done, total: self._progress(what, done, total)
            )
            last.clear()
            last.update(zip(policies, found, strict=True))
            return [1 - worst(each)[1] + each.loss * 1e-3 for each in found]

        rounds = rounds_of(len(candidates), LEAST_REQUESTS / len(self._planned))
        *_, final = successive_halving(candidates, rounds, evaluate, always=[self._default])
        best = final.candidates[0]
        changed = replace(offer, policies=best, outcomes=last[best], tuned=True)
        if changed.attainment > offer.attainment:
            self._offers[offer.fleet] = changed
            self._on_offer(changed)
        else:
            self._offers[offer.fleet] = replace(offer, tuned=True)

    def _policies(self, offer: Offer) -> list[Policies]:
        default = self._default
        several = len([group for group in offer.placement.groups if group.shares]) > 1
        others = [replace(default, dispatch=name) for name in DISPATCHES[1:]] if several else []
        schedulers = scheduler_candidates(default.scheduler, self._wanted.trials, self._wanted.seed)
        return [default, *others, *(replace(default, scheduler=each) for each in schedulers[1:])]

    def _later(self, offers: Sequence[Offer]) -> list[Later]:
        """The offers on the part that was held out."""
        self._progress("held-out part", 0, len(offers))
        trials = [PlacedTrial(each.placement, each.policies, self._held_out) for each in offers]
        found = self._simulate(trials)
        return [
            Later(offer, outcomes, interval(outcomes, self._wanted.seed))
            for offer, outcomes in zip(offers, found, strict=True)
        ]


def interval(outcomes: Outcomes, seed: int) -> Interval:
    """The attainment of the service that fares worst, and its confidence."""
    return mean_interval(outcomes.of(worst(outcomes)[0]).met, np.random.default_rng(seed))


def fleet_name(demand: Demand, fleet: Fleet) -> str:
    """``2 a100-80 + 1 l40s``."""
    kinds = demand.catalogue.devices
    return " + ".join(f"{count} {kind.name}" for kind, count in zip(kinds, fleet, strict=True) if count)
