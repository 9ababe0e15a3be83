"""Results of ``shoal plan``: tables, a picture and JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.simulate_view import facts_table
from shoal.cli.tune_report import interval_json, latency_cells, number_json
from shoal.config.scenario import Scenario
from shoal.config.scheduler_yaml import in_words, scheduler_settings
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.core import SLO
from shoal.measure import Panel, Series
from shoal.measure.tables import figure, seconds, share
from shoal.place.placement import Placement
from shoal.plan.capacity import DISPATCHES, Later, Offer, Plan, fleet_name
from shoal.plan.demand import Demand, Policies, unheeded
from shoal.plan.goals import Wanted
from shoal.plan.outcomes import mean, tail, worst

UNCHANGED = "as written"


def print_wanted(console: Console, demand: Demand, scenario: Scenario, wanted: Wanted) -> None:
    """Print what is planned for, and what may be bought."""
    facts = wanted_facts(demand, scenario, wanted)
    facts["devices"] = ", ".join(
        f"{kind.name} at {kind.price:g} {demand.catalogue.currency}, at most {kind.most}"
        for kind in demand.catalogue.devices
    )
    console.print(facts_table(facts))


def wanted_facts(demand: Demand, scenario: Scenario, wanted: Wanted) -> dict[str, str]:
    """What is planned for, by name."""
    facts = {"requests": f"{len(demand.requests):,}, of which {wanted.share:.0%} are planned for"}
    goals = section_of(SLO, goal_kinds())
    for service in demand.services:
        rate = _rate(demand, service.name)
        facts[f"service {service.name}"] = (
            f"{'' if service.model is None else service.model.name}: {figure(rate)} requests per second, "
            f"alone {seconds(service.execution_s)}, goals {goals.show(service.slo)}"
        )
    facts["scheduler"] = f"preset {scenario.preset}"
    facts["wanted"] = f"every service meets its goals for {share(wanted.attainment)} of its requests"
    if ignored := unheeded(scenario):
        facts["not heeded"] = (
            f"{', '.join(ignored)}: the plan says how many engines there are, on which devices, and what is "
            "between them"
        )
    return facts


def _rate(demand: Demand, service: str) -> float:
    own = [request for request in demand.requests if request.service == service]
    span_s = (demand.requests[-1].arrival_ns - demand.requests[0].arrival_ns) / 1e9
    return len(own) / max(span_s, 1e-9)


def print_plan(console: Console, demand: Demand, found: Plan) -> None:
    """Print the fleets that were looked at, and of the chosen one all that there is to say."""
    console.print(fleets_table(demand, found))
    if found.chosen is None:
        return
    console.print(placement_table(found.chosen.offer.placement))
    console.print(held_out_table(demand, found))
    offer = found.chosen.offer
    console.print(
        Text.assemble(
            "Plan: ",
            (fleet_name(demand, offer.fleet), "bold"),
            f", {figure(offer.cost)} {demand.catalogue.currency}, {_policies(demand, offer.policies)}.",
        )
    )
    for remark in remarks(demand, found):
        console.print(Text(remark, style="yellow"))


def offer_line(demand: Demand, offer: Offer) -> str:
    """A fleet that was just tried, in a line."""
    name = fleet_name(demand, offer.fleet)
    if not offer.placement.groups:
        return f"{name}: no room for every service"
    met = f"{share(offer.attainment)} of the goals met, {_policies(demand, offer.policies)}"
    return f"{name}, {figure(offer.cost)} {demand.catalogue.currency}: {met}"


def print_stopped(console: Console, demand: Demand, found: Plan) -> None:
    """Print what was tried before planning was interrupted."""
    if found.offers:
        console.print(fleets_table(demand, found))
    console.print(Text("Stopped before a plan was chosen: larger or smaller fleets may do.", style="yellow"))


def remarks(demand: Demand, found: Plan) -> list[str]:
    """What the later requests say against the plan, if there is one."""
    if found.chosen is None:
        return []
    wanted, said = found.wanted.attainment, []
    attained = found.chosen.attainment
    if attained.mean < wanted:
        low, high = share(attained.low), share(attained.high)
        said.append(
            f"Not confirmed: {share(attained.mean)} of the later requests met their goals ({low} to {high}), "
            f"and {share(wanted)} are wanted. Plan with more requests, or for a higher rate (--rate)."
        )
    for less in found.one_less:
        if less.attainment.mean >= wanted:
            said.append(
                f"{fleet_name(demand, less.offer.fleet)} kept the goals of later requests too "
                f"({share(less.attainment.mean)}), but of those planned for only "
                f"{share(less.offer.attainment)}."
            )
    return said


def nothing_found(demand: Demand, found: Plan) -> str:
    """That the catalogue has no plan, and how near it comes."""
    best = max(found.offers.values(), key=lambda offer: offer.attainment)
    return (
        f"nothing in the catalogue is enough: {fleet_name(demand, best.fleet)} attains "
        f"{share(best.attainment)}, of {share(found.wanted.attainment)} that are wanted; offer more devices "
        "(most) or other kinds, or loosen the goals"
    )


def fleets_table(demand: Demand, found: Plan) -> Table:
    """One row for each fleet that was looked at, by cost."""
    table = plain_table("Fleets that were tried, on the part planned for")
    for name in ("devices", "policies"):
        table.add_column(name, overflow="fold")
    for name in (demand.catalogue.currency, "SLO met", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    chosen = None if found.chosen is None else found.chosen.offer.fleet
    for offer in sorted(found.offers.values(), key=lambda each: (each.cost, each.fleet)):
        enough = offer.attainment >= found.wanted.attainment
        style = "bold" if offer.fleet == chosen else "" if enough else "dim"
        policies = _policies(demand, offer.policies)
        cells = (figure(offer.cost), share(offer.attainment), *latency_cells(offer.outcomes))
        idle = sum(offer.fleet) - offer.placement.devices
        name = fleet_name(demand, offer.fleet)
        name += f", {idle} idle" if idle and offer.placement.groups else ""
        table.add_row(Text(name), Text(policies), *cells, style=style)
    table.caption = "SLO met: of the service that fares worst; x alone, TTFT: below it, p99"
    return table


def placement_table(placement: Placement) -> Table:
    """One row for each group of devices with the same services: who is where."""
    table = plain_table("Placement")
    table.add_column("engine", overflow="fold")
    table.add_column("services", overflow="fold")
    for group in placement.groups:
        if group.shares:
            devices = ", ".join(device.name for device in group.devices)
            shared = ", ".join(
                name if part == 1 else f"{name} ({part:.0%} of it)" for name, part in group.shares
            )
            table.add_row(Text(devices), Text(shared))
    return table


def placement_json(placement: Placement) -> list[dict[str, Any]]:
    """The groups with services: their devices, and the share of each service's requests."""
    return [
        {"devices": [device.name for device in group.devices], "services": dict(group.shares)}
        for group in placement.groups
        if group.shares
    ]


def held_out_table(demand: Demand, found: Plan) -> Table:
    """The chosen fleet on later requests, and with one device less."""
    assert found.chosen is not None
    table = plain_table(f"Held-out part: {len(found.held_out):,} later requests")
    table.add_column("devices", overflow="fold")
    for name in (demand.catalogue.currency, "SLO met", "95% confidence", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    for number, later in enumerate([found.chosen, *found.one_less]):
        bounds = f"{later.attainment.low * 100:.1f}-{later.attainment.high * 100:.1f}"
        cells = (figure(later.offer.cost), share(later.attainment.mean), bounds)
        fleet = Text(fleet_name(demand, later.offer.fleet))
        style = "bold" if number == 0 else "dim"
        table.add_row(fleet, *cells, *latency_cells(later.outcomes), style=style)
    return table


def plan_panel(demand: Demand, found: Plan) -> Panel:
    """Cost against attainment: all fleets, the frontier, and what is wanted."""
    offers = list(found.offers.values())
    frontier = found.frontier
    costs = [offer.cost for offer in offers]
    wanted = found.wanted.attainment
    series = [
        Series("tried", costs, [offer.attainment for offer in offers], line=False, colour=7),
        Series(
            "most for the price",
            [offer.cost for offer in frontier],
            [offer.attainment for offer in frontier],
            line=True,
            steps=True,
        ),
        Series("wanted", [min(costs), max(costs)], [wanted, wanted], line=True, colour=2),
    ]
    if found.chosen is not None:
        chosen = found.chosen.offer
        name = fleet_name(demand, chosen.fleet)
        series.append(Series(f"plan: {name}", [chosen.cost], [chosen.attainment], line=False, colour=3))
        later = found.chosen.attainment.mean
        series.append(Series("the same on later requests", [chosen.cost], [later], line=False, colour=1))
    return Panel(
        title="Cost and attainment",
        x_label=f"devices, {demand.catalogue.currency}",
        y_label="requests that meet their goals (worst service)",
        series=series,
        share=True,
    )


def plan_json(demand: Demand, found: Plan) -> dict[str, Any]:
    """The plan as plain values; shares are 0 to 1, times in seconds, NaN is null."""
    return {
        "wanted": found.wanted.attainment,
        "planned_requests": len(found.planned),
        "held_out_requests": len(found.held_out),
        "stopped": found.stopped,
        "fleets": [_offer_json(demand, offer) for offer in found.offers.values()],
        "frontier": [_devices(demand, offer) for offer in found.frontier],
        "chosen": None if found.chosen is None else _later_json(demand, found.chosen),
        "one_less": [_later_json(demand, later) for later in found.one_less],
        "remarks": remarks(demand, found),
    }


def _offer_json(demand: Demand, offer: Offer) -> dict[str, Any]:
    return {
        "devices": _devices(demand, offer),
        "cost": offer.cost,
        "slo_attainment": offer.attainment,
        "normalised_latency": number_json(mean(offer.outcomes.latency)),
        "ttft_p99_s": number_json(tail(offer.outcomes.ttft_s)),
        "dispatch": offer.policies.dispatch,
        "scheduler": scheduler_settings(offer.policies.scheduler, "shoal"),
        "placement": placement_json(offer.placement),
    }


def _later_json(demand: Demand, later: Later) -> dict[str, Any]:
    return {
        "devices": _devices(demand, later.offer),
        "worst_service": worst(later.outcomes)[0],
        "slo_attainment": interval_json(later.attainment),
        "placement": placement_json(later.offer.placement),
    }


def _devices(demand: Demand, offer: Offer) -> dict[str, int]:
    kinds = demand.catalogue.devices
    return {kind.name: count for kind, count in zip(kinds, offer.fleet, strict=True) if count}


def _policies(demand: Demand, policies: Policies) -> str:
    """What differs from the scenario's scheduler and the default dispatch."""
    parts: Sequence[str] = [
        "" if policies.dispatch == DISPATCHES[0] else f"dispatch {policies.dispatch}",
        in_words(policies.scheduler, demand.engines.scheduler),
    ]
    return ", ".join(part for part in parts if part) or UNCHANGED


def plain_table(title: str) -> Table:
    """An empty one."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
