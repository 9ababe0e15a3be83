"""What a search has found, in one sentence."""

from types import SimpleNamespace

import numpy as np
import pytest

from shoal.core import Request, SamplingParams
from shoal.plan.capacity import FleetPlan, HeldOutPlan, Plan
from shoal.plan.catalog import Catalogue, DeviceKind
from shoal.plan.confidence import Interval
from shoal.plan.goals import PlanningOptions
from shoal.plan.halving import Ranked
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part
from shoal.plan.tune import HeldOutScheduler, TuningResult
from shoal.plan.verdict import plan_verdict, tune_verdict
from shoal.schedule import SchedulerOptions

NOTHING_KNOWN = Interval(np.nan, np.nan, np.nan)
WRITTEN, OTHER = SchedulerOptions(), SchedulerOptions(max_running=7)


def outcomes(met, latency=2.0, count=100):
    """Of a service of which this share of the requests met their goals; None: it has none."""
    goals = np.full(count, np.nan) if met is None else (np.arange(count) < met * count).astype(float)
    return Outcomes(["chat"] * count, goals, np.full(count, latency), np.full(count, 0.1))


def demand(services=2):
    """Requests that come ten times a second, and two kinds of devices."""
    requests = [
        Request(id=f"r{n}", service="chat", prompt=(1,), sampling=SamplingParams(), arrival_ns=n * 10**8)
        for n in range(100)
    ]
    kinds = (DeviceKind(name="a100-80", price=1.8), DeviceKind(name="l40s", price=0.9))
    return SimpleNamespace(
        catalogue=Catalogue(devices=kinds), requests=requests, services=[SimpleNamespace()] * services
    )


def tried(fleet, met):
    cost = 1.8 * fleet[0] + 0.9 * fleet[1]
    return FleetPlan(fleet=fleet, cost=cost, placement=None, policies=None, outcomes=outcomes(met))


def later(fleet, met):
    return HeldOutPlan(tried(fleet, 0.97), outcomes(met), Interval(met, met - 0.02, met + 0.02))


def plan(chosen=None, *, less=(), fleets=()):
    return Plan(
        options=PlanningOptions(attainment=0.95),
        planned=Part(0, 60),
        held_out=Part(60, 100),
        fleets={each.fleet: each for each in fleets},
        chosen=chosen,
        one_less=less,
    )


def test_a_plan_says_what_it_costs_and_how_it_did():
    found = plan_verdict(demand(), plan(later((2, 0), 0.96), less=[later((1, 0), 0.62)]))
    assert found.kind == "good"
    assert found.text == (
        "2 a100-80 for 2 services with 10.1 requests/s, 3.60 $/h: goals met by 96.0% of the held-out "
        "requests of the service that fares worst, and by 62.0% with one device less."
    )


def test_a_plan_of_one_device_for_one_service_has_nothing_less():
    found = plan_verdict(demand(1), plan(later((0, 1), 1.0)))
    assert found.text == (
        "1 l40s for 1 service with 10.1 requests/s, 0.900 $/h: goals met by 100.0% of the held-out requests."
    )


def test_a_plan_that_was_not_confirmed_or_could_be_smaller_is_fair():
    missed = plan_verdict(demand(), plan(later((2, 1), 0.9)))
    assert missed.kind == "fair"
    assert missed.text.startswith("Not confirmed: 2 a100-80 + 1 l40s for 2 services")
    assert missed.text.endswith("the service that fares worst, and 95.0% are wanted.")
    smaller = plan_verdict(demand(), plan(later((2, 1), 1.0), less=[later((1, 1), 0.5), later((2, 0), 0.96)]))
    assert smaller.kind == "fair"
    assert smaller.text.endswith("and by 96.0% with one device less.")


def test_without_a_plan_the_best_fleet_is_named():
    found = plan_verdict(demand(), plan(fleets=[tried((8, 0), 0.5), tried((0, 8), 0.7)]))
    assert found.kind == "bad"
    assert found.text == (
        "Nothing in the catalogue is enough: 8 l40s meets the goals of 70.0% of the requests, and 95.0% "
        "are wanted."
    )


def tuned(first, best, *, met=(0.8, 0.9), latency=(3.0, 2.0)):
    rows = [
        HeldOutScheduler(each, outcomes(share, value), NOTHING_KNOWN, NOTHING_KNOWN)
        for each, share, value in zip((WRITTEN, OTHER), met, latency, strict=True)
    ]
    return TuningResult(
        rounds=[Ranked(1.0, [first, WRITTEN if first == OTHER else OTHER], [0.1, 0.2])],
        searched=Part(0, 45),
        decided=Part(45, 60),
        held_out=Part(60, 160),
        best=best,
        gain=NOTHING_KNOWN,
        table=rows,
    )


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (
            tuned(OTHER, OTHER),
            "good",
            "Best: max_running 7, on the 15 requests behind the search too; the share of 100 held-out "
            "requests that met their goals is 90.0%, as written 80.0%.",
        ),
        (
            tuned(OTHER, OTHER, met=(None, None)),
            "good",
            "Best: max_running 7, on the 15 requests behind the search too; the mean normalised latency of "
            "100 held-out requests is 2.00, as written 3.00.",
        ),
        (
            tuned(OTHER, WRITTEN),
            "fair",
            "Best in the search was max_running 7, but on the 15 requests behind it not for sure, so that "
            "the scheduler stays as it is written (more requests would tell); the share of 100 held-out "
            "requests that met their goals is 80.0%.",
        ),
        (
            tuned(WRITTEN, WRITTEN),
            "fair",
            "Nothing that was tried is better than the scheduler as it is written; the share of 100 held-out "
            "requests that met their goals is 80.0%.",
        ),
    ],
)
def test_a_search_for_a_scheduler_says_what_it_gains(found, kind, text):
    conclusion = tune_verdict(found, WRITTEN)
    assert (conclusion.kind, conclusion.text) == (kind, text)
