"""Results of ``shoal plan``: tables, a picture and JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.tune_report import interval_json, latency_cells, number_json
from shoal.config.scenario import Scenario
from shoal.config.scheduler_yaml import in_words, scheduler_settings
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.core import SLO
from shoal.measure import Panel, Series
from shoal.measure.tables import figure, seconds, share
from shoal.place.placement import Placement
from shoal.plan.capacity import DISPATCHES, FleetPlan, HeldOutPlan, Plan, fleet_name
from shoal.plan.demand import Demand, Policies, ignored_settings
from shoal.plan.goals import PlanningOptions
from shoal.plan.outcomes import mean, tail, worst_service
from shoal.plan.verdict import demand_rate, plan_verdict

UNCHANGED = "as written"


def plan_facts(demand: Demand, scenario: Scenario, options: PlanningOptions) -> dict[str, str]:
    """The services, requests and goals to plan for, and the available devices."""
    facts = problem_facts(demand, scenario, options)
    facts["devices"] = ", ".join(
        f"{kind.name} at {kind.price:g} {demand.catalogue.currency}, at most {kind.most}"
        for kind in demand.catalogue.devices
    )
    return facts


def problem_facts(demand: Demand, scenario: Scenario, options: PlanningOptions) -> dict[str, str]:
    """The services, requests and goals to plan for, by name."""
    facts = {"requests": f"{len(demand.requests):,}, of which {options.share:.0%} are planned for"}
    goals = section_of(SLO, goal_kinds())
    for service in demand.services:
        rate = demand_rate(demand, service.name)
        facts[f"service {service.name}"] = (
            f"{'' if service.model is None else service.model.name}: {figure(rate)} requests per second, "
            f"alone {seconds(service.execution_s)}, goals {goals.show(service.slo)}"
        )
    if scenario.weights.memory_bytes is not None:
        facts["weights"] = (
            f"{scenario.weights.memory_bytes / 2**30:.1f} GiB of each device, in which services with more "
            "take turns"
        )
    facts["scheduler"] = f"preset {scenario.preset}"
    facts["wanted"] = f"every service meets its goals for {share(options.attainment)} of its requests"
    if ignored := ignored_settings(scenario):
        facts["not heeded"] = (
            f"{', '.join(ignored)}: the plan says how many engines there are, on which devices, and what is "
            "between them"
        )
    return facts


def print_plan(console: Console, demand: Demand, found: Plan) -> None:
    """Print the fleets that were tried, and the placement and figures of the chosen one."""
    console.print(fleets_table(demand, found))
    if found.chosen is None:
        return
    console.print(placement_table(found.chosen.plan.placement))
    console.print(held_out_table(demand, found))
    fleet_plan = found.chosen.plan
    console.print(
        Text.assemble(
            "Plan: ",
            (fleet_name(demand, fleet_plan.fleet), "bold"),
            f", {figure(fleet_plan.cost)} {demand.catalogue.currency}, "
            f"{_policies(demand, fleet_plan.policies)}.",
        )
    )
    console.print(Text(plan_verdict(demand, found).text, style="bold"))
    for remark in remarks(demand, found):
        console.print(Text(remark, style="yellow"))


def fleet_line(demand: Demand, fleet_plan: FleetPlan) -> str:
    """The result of one fleet, in one line."""
    name = fleet_name(demand, fleet_plan.fleet)
    if not fleet_plan.placement.groups:
        return f"{name}: no room for every service"
    met = f"{share(fleet_plan.attainment)} of the goals met, {_policies(demand, fleet_plan.policies)}"
    return f"{name}, {figure(fleet_plan.cost)} {demand.catalogue.currency}: {met}"


def print_stopped(console: Console, demand: Demand, found: Plan) -> None:
    """Print the fleets that were tried before planning was interrupted."""
    if found.fleets:
        console.print(fleets_table(demand, found))
    console.print(Text("Stopped before a plan was chosen: larger or smaller fleets may do.", style="yellow"))


def remarks(demand: Demand, found: Plan) -> list[str]:
    """Objections to the plan from its results on later requests."""
    if found.chosen is None:
        return []
    wanted, objections = found.options.attainment, []
    attained = found.chosen.attainment
    if not found.confirmed:
        low, high = share(attained.low), share(attained.high)
        objections.append(
            f"Not confirmed: {share(attained.mean)} of the later requests met their goals ({low} to {high}), "
            f"and {share(wanted)} are wanted. Plan with more requests, or for a higher rate (--rate)."
        )
    for less in found.one_less:
        if less.attainment.mean >= wanted:
            objections.append(
                f"{fleet_name(demand, less.plan.fleet)} kept the goals of later requests too "
                f"({share(less.attainment.mean)}), but of those planned for only "
                f"{share(less.plan.attainment)}."
            )
    return objections


def no_plan_message(demand: Demand, found: Plan) -> str:
    """Error message for a catalogue without a sufficient fleet; names the best one."""
    best = max(found.fleets.values(), key=lambda fleet_plan: fleet_plan.attainment)
    return (
        f"nothing in the catalogue is enough: {fleet_name(demand, best.fleet)} attains "
        f"{share(best.attainment)}, of {share(found.options.attainment)} that are wanted; offer more "
        "devices (most) or other kinds, or loosen the goals"
    )


def fleets_table(demand: Demand, found: Plan) -> Table:
    """One row for each fleet that was tried, by cost."""
    table = new_table("Fleets that were tried, on the part planned for")
    for name in ("devices", "policies"):
        table.add_column(name, overflow="fold")
    for name in (demand.catalogue.currency, "SLO met", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    chosen = None if found.chosen is None else found.chosen.plan.fleet
    for fleet_plan in sorted(found.fleets.values(), key=lambda each: (each.cost, each.fleet)):
        enough = fleet_plan.attainment >= found.options.attainment
        style = "bold" if fleet_plan.fleet == chosen else "" if enough else "dim"
        policies = _policies(demand, fleet_plan.policies)
        cells = (figure(fleet_plan.cost), share(fleet_plan.attainment), *latency_cells(fleet_plan.outcomes))
        idle = sum(fleet_plan.fleet) - fleet_plan.placement.devices
        name = fleet_name(demand, fleet_plan.fleet)
        name += f", {idle} idle" if idle and fleet_plan.placement.groups else ""
        table.add_row(Text(name), Text(policies), *cells, style=style)
    table.caption = "SLO met: of the service that fares worst; x alone, TTFT: below it, p99"
    return table


def placement_table(placement: Placement) -> Table:
    """One row for each engine: its devices and services."""
    table = new_table("Placement")
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
    """The devices of each engine, and the share of each service's requests that it serves."""
    return [
        {"devices": [device.name for device in group.devices], "services": dict(group.shares)}
        for group in placement.groups
        if group.shares
    ]


def held_out_table(demand: Demand, found: Plan) -> Table:
    """The chosen fleet on later requests, compared with one device less."""
    assert found.chosen is not None
    table = new_table(f"Held-out part: {len(found.held_out):,} later requests")
    table.add_column("devices", overflow="fold")
    for name in (demand.catalogue.currency, "SLO met", "95% confidence", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    for number, later in enumerate([found.chosen, *found.one_less]):
        bounds = f"{later.attainment.low * 100:.1f}-{later.attainment.high * 100:.1f}"
        cells = (figure(later.plan.cost), share(later.attainment.mean), bounds)
        fleet = Text(fleet_name(demand, later.plan.fleet))
        style = "bold" if number == 0 else "dim"
        table.add_row(fleet, *cells, *latency_cells(later.outcomes), style=style)
    return table


def plan_panel(demand: Demand, found: Plan) -> Panel:
    """Cost against attainment: all fleets, the Pareto frontier, and the required attainment."""
    plans = list(found.fleets.values())
    frontier = found.frontier
    costs = [fleet_plan.cost for fleet_plan in plans]
    wanted = found.options.attainment
    series = [
        Series("tried", costs, [fleet_plan.attainment for fleet_plan in plans], line=False, colour=7),
        Series(
            "most for the price",
            [fleet_plan.cost for fleet_plan in frontier],
            [fleet_plan.attainment for fleet_plan in frontier],
            line=True,
            steps=True,
        ),
        Series("wanted", [min(costs), max(costs)], [wanted, wanted], line=True, colour=2),
    ]
    if found.chosen is not None:
        chosen = found.chosen.plan
        name = fleet_name(demand, chosen.fleet)
        series.append(Series(f"plan: {name}", [chosen.cost], [chosen.attainment], colour=3, shape="D"))
        later = found.chosen.attainment.mean
        series.append(Series("the same on later requests", [chosen.cost], [later], colour=1, shape="s"))
    return Panel(
        title="Cost and attainment",
        x_label=f"devices, {demand.catalogue.currency}",
        y_label="goals met (worst service)",
        series=series,
        share=True,
    )


def plan_json(demand: Demand, found: Plan) -> dict[str, Any]:
    """The plan as plain values; shares are 0 to 1, times in seconds, NaN is null."""
    return {
        "wanted": found.options.attainment,
        "planned_requests": len(found.planned),
        "held_out_requests": len(found.held_out),
        "stopped": found.stopped,
        "fleets": [_fleet_json(demand, fleet_plan) for fleet_plan in found.fleets.values()],
        "frontier": [_devices(demand, fleet_plan) for fleet_plan in found.frontier],
        "chosen": None if found.chosen is None else _held_out_json(demand, found.chosen),
        "one_less": [_held_out_json(demand, later) for later in found.one_less],
        "remarks": remarks(demand, found),
    }


def _fleet_json(demand: Demand, fleet_plan: FleetPlan) -> dict[str, Any]:
    return {
        "devices": _devices(demand, fleet_plan),
        "cost": fleet_plan.cost,
        "slo_attainment": fleet_plan.attainment,
        "normalised_latency": number_json(mean(fleet_plan.outcomes.latency)),
        "ttft_p99_s": number_json(tail(fleet_plan.outcomes.ttft_s)),
        "dispatch": fleet_plan.policies.dispatch,
        "scheduler": scheduler_settings(fleet_plan.policies.scheduler, "shoal"),
        "placement": placement_json(fleet_plan.placement),
    }


def _held_out_json(demand: Demand, later: HeldOutPlan) -> dict[str, Any]:
    return {
        "devices": _devices(demand, later.plan),
        "worst_service": worst_service(later.outcomes)[0],
        "slo_attainment": interval_json(later.attainment),
        "placement": placement_json(later.plan.placement),
    }


def _devices(demand: Demand, fleet_plan: FleetPlan) -> dict[str, int]:
    kinds = demand.catalogue.devices
    return {kind.name: count for kind, count in zip(kinds, fleet_plan.fleet, strict=True) if count}


def _policies(demand: Demand, policies: Policies) -> str:
    """Differences from the scenario's scheduler and the default dispatch."""
    parts: Sequence[str] = [
        "" if policies.dispatch == DISPATCHES[0] else f"dispatch {policies.dispatch}",
        in_words(policies.scheduler, demand.engines.scheduler),
    ]
    return ", ".join(part for part in parts if part) or UNCHANGED


def new_table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
