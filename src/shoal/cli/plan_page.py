"""The HTML report of ``shoal plan``."""

from collections.abc import Mapping

import numpy as np

from shoal.cli.plan_report import fleets_table, held_out_table, placement_table, plan_panel, remarks
from shoal.config.scenario_facts import some
from shoal.measure import Panel
from shoal.measure.curves import distribution
from shoal.measure.page import Page, Tile
from shoal.measure.tables import Grid, figure, seconds, share
from shoal.plan.capacity import HeldOutPlan, Plan, fleet_name
from shoal.plan.confidence import FloatArray
from shoal.plan.demand import Demand
from shoal.plan.outcomes import Outcomes, mean, tail
from shoal.plan.verdict import demand_rate, plan_verdict

_NAMED = 8
"""Services that a picture shows by name, at most."""
_WORDS = (
    "Goals met: share of the requests with goals that met all of them, of the service with the lowest. "
    "Normalised latency, x alone: time from arrival to last token in units of what the mean request of the "
    "service takes alone. Held-out requests are later than those planned for; nothing was decided on them."
)


def plan_page(demand: Demand, found: Plan, facts: Mapping[str, str]) -> Page:
    """What the report of a plan has; facts: what was planned for."""
    conclusion = plan_verdict(demand, found)
    models = sorted({each.name if each.model is None else each.model.name for each in demand.services})
    rate = f"{figure(demand_rate(demand))} requests/s"
    chosen = found.chosen
    devices = "the devices of the catalogue" if chosen is None else fleet_name(demand, chosen.plan.fleet)
    grids = [] if chosen is None else [placement_table(chosen.plan.placement), held_out_table(demand, found)]
    return Page(
        title=f"{some(models)} on {devices}, {rate}",
        name="The cheapest devices that meet the goals",
        kind=conclusion.kind,
        verdict=conclusion.text,
        remarks=remarks(demand, found),
        facts=facts,
        tiles=[] if chosen is None else _tiles(demand, found, chosen),
        pictures=[plan_panel(demand, found), *_held_out_panels(demand, chosen)],
        grids=[Grid.of(table) for table in (*grids, fleets_table(demand, found))],
        words=[_WORDS],
    )


def _held_out_panels(demand: Demand, chosen: HeldOutPlan | None) -> list[Panel]:
    """Of each service on the chosen devices, those that fare worst first."""
    if chosen is None:
        return []
    outcomes = chosen.outcomes
    services = {name: outcomes.of(name) for name in dict.fromkeys(outcomes.services)}
    worst_first = sorted(services, key=lambda name: (np.nan_to_num(services[name].attainment, nan=2.0), name))
    goals = {each.name: each.slo.ttft_s for each in demand.services if each.slo.ttft_s is not None}
    return outcome_panels({name: services[name] for name in worst_first}, goals)


def outcome_panels(outcomes: Mapping[str, Outcomes], ttft_goals: Mapping[str, float]) -> list[Panel]:
    """Distributions of TTFT and normalised latency on held-out requests, by name."""
    colours = {name: number for number, name in enumerate(list(outcomes)[:_NAMED])}
    goals = {name: goal for name, goal in ttft_goals.items() if name in colours}
    times = {name: _known(each.ttft_s) for name, each in outcomes.items()}
    latencies = {name: _known(each.latency) for name, each in outcomes.items()}
    drawn = [
        distribution("Time to first token (TTFT), held-out requests", times, colours, goals, total=False),
        distribution(
            "Normalised latency, held-out requests",
            latencies,
            colours,
            {},
            "E2E / execution time",
            total=False,
        ),
    ]
    return [panel for panel in drawn if panel.series]


def _known(values: FloatArray) -> list[float]:
    known: list[float] = values[~np.isnan(values)].tolist()
    return known


def _tiles(demand: Demand, found: Plan, chosen: HeldOutPlan) -> list[Tile]:
    attained, outcomes = chosen.attainment, chosen.outcomes
    tiles = [
        Tile("Cost", figure(chosen.plan.cost), demand.catalogue.currency),
        Tile("Goals met", share(attained.mean), f"{attained.low:.1%} to {attained.high:.1%}"),
        Tile("Wanted", share(found.options.attainment), f"of each of {len(demand.services)} services"),
        Tile("Fleets tried", f"{len(found.fleets):,}", f"on {len(found.planned):,} requests"),
    ]
    if not np.isnan(mean(outcomes.ttft_s)):
        ttft = Tile("TTFT, mean", seconds(mean(outcomes.ttft_s)), f"p99 {seconds(tail(outcomes.ttft_s))}")
        tiles.append(ttft)
    return tiles
