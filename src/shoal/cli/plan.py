"""``shoal plan``: search the cheapest devices that meet a workload's latency goals, by simulation."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import ConfigFile, scenario_defaults, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, json_text, print_written, write_texts
from shoal.cli.planning_flags import (
    PLAN_FLAGS,
    RESULTS,
    SEARCH,
    WANTED,
    Attainment,
    JsonFile,
    SearchShare,
    ServerFile,
    Slo,
    read_inputs,
)
from shoal.config.setting_tree import Table
from shoal.core import ShoalError

NOT_CONFIRMED = 3
"""Exit status of a plan that later requests do not confirm."""


@with_flags(PLAN_FLAGS, defaults=scenario_defaults)
def plan(
    devices: Annotated[
        Path,
        typer.Option(
            "--devices",
            metavar="CATALOGUE",
            help="YAML file with the available kinds of devices, and their prices.",
            rich_help_panel=WANTED,
        ),
    ],
    config: ConfigFile = None,
    slo: Slo = None,
    attainment: Attainment = "95%",
    out: ServerFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw cost against attainment (png, svg, pdf).",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report, one page.", rich_help_panel=RESULTS),
    ] = None,
    json_path: JsonFile = None,
    trials: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Schedulers to try where a cheaper fleet nearly suffices; 1: only that of the scenario.",
            rich_help_panel=SEARCH,
        ),
    ] = 27,
    search_share: SearchShare = "60%",
    *,
    settings: Table,
) -> None:
    """Find the cheapest devices, placement and policies that meet the latency goals of a workload.

    Services and workload are written as for `shoal simulate`, in a file or as flags. The available devices
    are in a catalogue:

    `devices: [{name: a100-80, price: 1.8, most: 8}, {name: l40s, price: 0.9}]`

    Known kinds bring their data sheets; others need `memory` and `latency`. The plan is simulated on a later
    part of the workload, and compared with the same plan with one device less. The exit status is 3 where the
    later part does not confirm the plan, and 1 where nothing in the catalogue is enough.

    **Examples:**

    `shoal plan --devices devices.yaml --config scenario.yaml --slo ttft=1s,tpot=60ms --out shoal.yaml`

    `shoal plan --devices devices.yaml --service chat=Qwen/Qwen2.5-7B-Instruct,slo.ttft=1s --trace azure.csv`
    """
    from rich.console import Console

    from shoal.cli.plan_page import plan_page
    from shoal.cli.plan_report import (
        fleet_line,
        no_plan_message,
        plan_facts,
        plan_json,
        plan_panel,
        print_plan,
        print_stopped,
        remarks,
    )
    from shoal.cli.progress import ProgressDisplay
    from shoal.cli.simulate_view import facts_table
    from shoal.measure import require_plots, save_plot
    from shoal.measure.page import page_html
    from shoal.plan.capacity import Stopped, plan
    from shoal.plan.deployment import missing_weights, server_text

    check_outputs(out, html, json_path, picture=plot)
    if plot is not None or html is not None:
        require_plots()
    scenario, options, demand = read_inputs(
        devices, config, settings, slo, attainment, search_share, trials=trials, to_serve=out is not None
    )
    console = Console(stderr=STANDARD_OUTPUT in (out, html, json_path))
    facts = plan_facts(demand, scenario, options)
    console.print(facts_table(facts))
    with ProgressDisplay() as progress:
        try:
            found = plan(
                demand,
                options,
                progress.update,
                lambda fleet_plan: progress.note(fleet_line(demand, fleet_plan)),
            )
        except Stopped as stop:
            progress.stop()
            written = write_texts([(json_path, json_text(plan_json(demand, stop.found)))])
            print_stopped(console, demand, stop.found)
            print_written(console, written)
            raise
    results = [(json_path, json_text(plan_json(demand, found)))]
    missing = None
    if out is not None and found.chosen is not None:
        chosen = found.chosen.plan
        missing = missing_weights(demand)
        notes = [*remarks(demand, found), *([missing] if missing else [])]
        text = server_text(demand, scenario, chosen.placement, chosen.policies, notes)
        results.append((out, text))
    if html is not None:
        results.append((html, page_html(plan_page(demand, found, facts))))
    written = write_texts(results)
    if plot is not None:
        save_plot(plot, [[plan_panel(demand, found)]])
        written.append(plot)
    print_plan(console, demand, found)
    if missing is not None:
        console.print(missing, style="yellow", markup=False, highlight=False)
    print_written(console, written)
    if found.chosen is None:
        raise ShoalError(no_plan_message(demand, found))
    if not found.confirmed:
        raise typer.Exit(NOT_CONFIRMED)
