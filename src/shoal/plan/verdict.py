"""What ``shoal plan`` and ``shoal tune`` have found, in one sentence each."""

import math
from dataclasses import dataclass

from shoal.config.scheduler_yaml import in_words
from shoal.measure.tables import figure, share
from shoal.plan.capacity import HeldOutPlan, Plan, fleet_name
from shoal.plan.demand import Demand
from shoal.plan.outcomes import mean
from shoal.plan.tune import HeldOutScheduler, TuningResult
from shoal.schedule import SchedulerOptions


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a search has found."""

    kind: str
    """"good", "fair" or "bad"."""
    text: str
    """One sentence."""


def plan_verdict(demand: Demand, found: Plan) -> Conclusion:
    """The chosen fleet, and how it did on the held-out requests.

    ``good``: as wanted; ``fair``: less than that, or one device less would have done; ``bad``: there is no
    plan.
    """
    wanted = found.options.attainment
    if found.chosen is None:
        best = max(found.fleets.values(), key=lambda each: each.attainment)
        return Conclusion(
            "bad",
            f"Nothing in the catalogue is enough: {fleet_name(demand, best.fleet)} meets the goals of "
            f"{share(best.attainment)} of the requests, and {share(wanted)} are wanted.",
        )
    chosen = found.chosen
    met = f"goals met by {share(chosen.attainment.mean)} of the held-out requests{_worst(demand)}"
    text = f"{plan_subject(demand, chosen)}, {figure(chosen.plan.cost)} {demand.catalogue.currency}: {met}"
    if chosen.attainment.mean < wanted:
        return Conclusion("fair", f"Not confirmed: {text}, and {share(wanted)} are wanted.")
    enough = [less for less in found.one_less if less.attainment.mean >= wanted]
    less = max(found.one_less, key=lambda each: each.attainment.mean, default=None)
    with_less = "" if less is None else f", and by {share(less.attainment.mean)} with one device less"
    return Conclusion("fair" if enough else "good", f"{text}{with_less}.")


def plan_subject(demand: Demand, chosen: HeldOutPlan) -> str:
    """The chosen devices, and what they are for."""
    services = len(demand.services)
    count = f"{services} service{'s' if services > 1 else ''}"
    return (
        f"{fleet_name(demand, chosen.plan.fleet)} for {count} with {figure(demand_rate(demand))} requests/s"
    )


def demand_rate(demand: Demand, service: str | None = None) -> float:
    """Requests per second of a service, or of all."""
    own = [request for request in demand.requests if service in (None, request.service)]
    span_s = (demand.requests[-1].arrival_ns - demand.requests[0].arrival_ns) / 1e9
    return len(own) / max(span_s, 1e-9)


def _worst(demand: Demand) -> str:
    return " of the service that fares worst" if len(demand.services) > 1 else ""


def tune_verdict(tuned: TuningResult, default: SchedulerOptions) -> Conclusion:
    """The best scheduler, and how it did on the held-out requests beside the one as written.

    ``good``: another scheduler than the one as written; ``fair``: that one stays.
    """
    first = tuned.rounds[-1].candidates[0]
    decided = len(tuned.decided)
    rows = {row.scheduler: row for row in tuned.table}
    written = rows[default]
    if first == default:
        text = "Nothing that was tried is better than the scheduler as it is written"
        return Conclusion("fair", f"{text}; {_on_held_out(tuned, written)}.")
    if tuned.best == default:
        return Conclusion(
            "fair",
            f"Best in the search was {in_words(first, default)}, but on the {decided:,} requests behind it "
            "not for sure, so that the scheduler stays as it is written (more requests would tell); "
            f"{_on_held_out(tuned, written)}.",
        )
    return Conclusion(
        "good",
        f"Best: {in_words(first, default)}, on the {decided:,} requests behind the search too; "
        f"{_on_held_out(tuned, rows[tuned.best])}, as written {_figure_of(written)}.",
    )


def _on_held_out(tuned: TuningResult, row: HeldOutScheduler) -> str:
    of = f"{len(tuned.held_out):,} held-out requests"
    if math.isnan(row.outcomes.attainment):
        return f"the mean normalised latency of {of} is {_figure_of(row)}"
    return f"the share of {of} that met their goals is {_figure_of(row)}"


def _figure_of(row: HeldOutScheduler) -> str:
    """Share of the goals that were met, or without goals the mean of normalised latency."""
    if math.isnan(row.outcomes.attainment):
        return figure(mean(row.outcomes.latency))
    return share(row.outcomes.attainment)
