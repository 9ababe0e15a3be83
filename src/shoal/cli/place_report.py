"""Results of ``shoal place``: tables and JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.plan_report import placement_json, placement_table, plain_table
from shoal.cli.tune_report import interval_json, latency_cells, number_json
from shoal.measure.tables import share
from shoal.plan.outcomes import mean, tail, worst
from shoal.plan.placing import Judged, Placed


def print_placed(console: Console, placed: Placed) -> None:
    """Print what was found, and how it fares on later requests beside the others."""
    console.print(placement_table(placed.found.candidate.placement))
    if placed.idle:
        console.print(Text(f"Idle: {', '.join(placed.idle)}"))
    console.print(judged_table(placed))
    for name in placed.no_room:
        console.print(Text(f"Not compared with {name}: there is no room for that.", style="dim"))
    for remark in remarks(placed):
        console.print(Text(remark, style="yellow"))


def remarks(placed: Placed) -> list[str]:
    """What the later requests say against what was found."""
    found = placed.found.attainment
    better = [each for each in placed.others if each.attainment.mean > found.mean]
    return [
        f"Not confirmed: of the later requests {share(found.mean)} met their goals as placed, and "
        f"{share(each.attainment.mean)} with {each.candidate.name}. Place with more requests."
        for each in better
    ]


def judged_table(placed: Placed) -> Table:
    """One row for each placement, the one that was found first."""
    table = plain_table(f"Held-out part: {len(placed.held_out):,} later requests")
    table.add_column("placement", overflow="fold")
    for name in ("SLO met", "95% confidence", "worst service", "x alone", "TTFT"):
        table.add_column(name, justify="right")
    for each in (placed.found, *placed.others):
        low, high = each.attainment.low * 100, each.attainment.high * 100
        service, least = worst(each.outcomes)
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


def placed_json(placed: Placed) -> dict[str, Any]:
    """The result as plain values; shares are 0 to 1, times in seconds, NaN is null."""
    return {
        "searched_requests": len(placed.searched),
        "held_out_requests": len(placed.held_out),
        "idle": list(placed.idle),
        "placements": [_judged_json(each) for each in (placed.found, *placed.others)],
    }


def _judged_json(judged: Judged) -> dict[str, Any]:
    outcomes = judged.outcomes
    return {
        "name": judged.candidate.name,
        "dispatch": judged.candidate.policies.dispatch,
        "placement": placement_json(judged.candidate.placement),
        "slo_attainment": interval_json(judged.attainment),
        "services": {
            name: number_json(outcomes.of(name).attainment) for name in sorted(set(outcomes.services))
        },
        "normalised_latency": number_json(mean(outcomes.latency)),
        "normalised_latency_p99": number_json(tail(outcomes.latency)),
        "ttft_s": number_json(mean(outcomes.ttft_s)),
        "ttft_p99_s": number_json(tail(outcomes.ttft_s)),
    }
