"""``shoal place``: search a placement of services on given devices, by simulation."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import ConfigFile, scenario_defaults, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, json_text, print_written, write_texts
from shoal.cli.planning_flags import (
    PLAN_FLAGS,
    RESULTS,
    WANTED,
    Attainment,
    JsonFile,
    SearchShare,
    ServerFile,
    Slo,
    read_inputs,
)
from shoal.config.setting_tree import Table


@with_flags(PLAN_FLAGS, defaults=scenario_defaults)
def place(
    devices: Annotated[
        Path,
        typer.Option(
            "--devices",
            metavar="CATALOGUE",
            help="YAML file with the devices that there are: kinds, and how many of each (most).",
            rich_help_panel=WANTED,
        ),
    ],
    config: ConfigFile = None,
    slo: Slo = None,
    attainment: Attainment = "95%",
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            "--compare",
            metavar="FILE",
            help="A server's shoal.yaml whose placement is simulated for comparison; may be repeated.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    out: ServerFile = None,
    json_path: JsonFile = None,
    search_share: SearchShare = "60%",
    *,
    settings: Table,
) -> None:
    """Find which services share which of your devices, so that most requests meet their latency goals.

    Services and workload are written as for `shoal simulate`, in a file or as flags. The devices, all of
    which exist, are in a catalogue as for `shoal plan`:

    `devices: [{name: a100-80, most: 4}, {name: l40s, most: 2}]`

    The placement found on the earlier requests is simulated on the later ones. It is compared with all
    services on every device, with each service on devices of its own, and with the placements of `--compare`,
    whose engines are named as the devices here (`a100-80-0`, ...) and keep their own scheduler and dispatch.

    **Examples:**

    `shoal place --devices devices.yaml --config scenario.yaml --slo ttft=1s,tpot=60ms --out shoal.yaml`

    `shoal place --devices devices.yaml --config scenario.yaml --slo ttft=1s --compare shoal.yaml --rate 12`
    """
    from rich.console import Console

    from shoal.cli.place_report import placed_json, print_placed, remarks
    from shoal.cli.plan_report import problem_facts
    from shoal.cli.progress import ProgressDisplay
    from shoal.cli.simulate_view import facts_table
    from shoal.config.settings import load_config
    from shoal.plan.deployment import configured_candidate, missing_weights, server_text
    from shoal.plan.placing import place
    from shoal.serve.options import ServerOptions

    check_outputs(out, json_path)
    scenario, options, demand = read_inputs(
        devices, config, settings, slo, attainment, search_share, to_serve=out is not None
    )
    others = [
        configured_candidate(str(file), load_config(ServerOptions, file=file), demand)
        for file in compare or ()
    ]
    console = Console(stderr=STANDARD_OUTPUT in (out, json_path))
    facts = problem_facts(demand, scenario, options)
    facts["devices"] = ", ".join(f"{kind.most} {kind.name}" for kind in demand.catalogue.devices)
    console.print(facts_table(facts))
    with ProgressDisplay() as progress:
        placed = place(demand, options, others, progress.update)
    results = [(json_path, json_text(placed_json(placed)))]
    missing = None
    if out is not None:
        missing = missing_weights(demand)
        found = placed.found.candidate
        notes = [*remarks(placed), *([missing] if missing else [])]
        text = server_text(demand, scenario, found.placement, found.policies, notes)
        results.append((out, text))
    written = write_texts(results)
    print_placed(console, placed)
    if missing is not None:
        console.print(missing, style="yellow", markup=False, highlight=False)
    print_written(console, written)
