"""Results of ``shoal place``: tables and JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.plan_report import new_table, placement_json, placement_table
from shoal.cli.tune_report import interval_json, latency_cells, number_json
from shoal.measure.tables import share
from shoal.plan.outcomes import mean, tail, worst_service
from shoal.plan.placing import HeldOutPlacement, PlacingResult


def print_placed(console: Console, placed: PlacingResult) -> None:
    """Print the placement that was found, and compare it with others on later requests."""
    console.print(placement_table(placed.found.candidate.placement))
    if placed.idle:
        console.print(Text(f"Idle: {', '.join(placed.idle)}"))
    console.print(held_out_table(placed))
    for name in placed.no_room:
        console.print(Text(f"Not compared with {name}: there is no room for that.", style="dim"))
    for remark in remarks(placed):
        console.print(Text(remark, style="yellow"))


def remarks(placed: PlacingResult) -> list[str]:
    """Objections to the placement from its results on later requests."""
    found = placed.found.attainment
    better = [each for each in placed.others if each.attainment.mean > found.mean]
    return [
        f"Not confirmed: of the later requests {share(found.mean)} met their goals as placed, and "
        f"{share(each.attainment.mean)} with {each.candidate.name}. Place with more requests."
        for each in better
    ]


def held_out_table(placed: PlacingResult) -> Table:
    """One row for each placement, first the one that was found."""
    table = new_table(f"Held-out part: {len(placed.held_out):,} later requests")
    table.add_column("placement", overflow="fold")
    for name in ("SLO met", "95% confidence", "worst service", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    for each in (placed.found, *placed.others):
        low, high = each.attainment.low * 100, each.attainment.high * 100
        service, least = worst_service(each.outcomes)
        table.add_row(
            Text(each.candidate.name),
            share(each.attainment.mean),
            f"{low:.1f}-{high:.1f}",
            Text(f"{service}\n{share(least)}"),
            *latency_cells(each.outcomes),
            style="bold" if each is placed.found else "",
        )
    table.caption = "x alone, TTFT: below it, p99"
    return table


def placed_json(placed: PlacingResult) -> dict[str, Any]:
    """The result as plain values; shares are 0 to 1, times in seconds, NaN is null."""
    return {
        "searched_requests": len(placed.searched),
        "held_out_requests": len(placed.held_out),
        "idle": list(placed.idle),
        "placements": [_placement_json(each) for each in (placed.found, *placed.others)],
    }


def _placement_json(result: HeldOutPlacement) -> dict[str, Any]:
    outcomes = result.outcomes
    return {
        "name": result.candidate.name,
        "dispatch": result.candidate.policies.dispatch,
        "placement": placement_json(result.candidate.placement),
        "slo_attainment": interval_json(result.attainment),
        "services": {
            name: number_json(outcomes.of(name).attainment) for name in sorted(set(outcomes.services))
        },
        "normalised_latency": number_json(mean(outcomes.latency)),
        "normalised_latency_p99": number_json(tail(outcomes.latency)),
        "ttft_s": number_json(mean(outcomes.ttft_s)),
        "ttft_p99_s": number_json(tail(outcomes.ttft_s)),
    }
