"""``shoal tune``: search the best scheduler for a workload, by simulation."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import ConfigFile, parse_share, scenario_defaults, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, json_text, print_written, write_texts
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.setting_tree import Table

_SEARCH = "Search"
_RESULTS = "Results"


@with_flags(SCENARIO_FLAGS, defaults=scenario_defaults)
def tune(
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the best scheduler as YAML, for serve and simulate; - is standard output.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report, one page.", rich_help_panel=_RESULTS),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Write rounds and figures as JSON; - is standard output.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="N", min=2, help="Schedulers to try.", rich_help_panel=_SEARCH)
    ] = 81,
    search_share: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Share of the requests, the earliest, for search and decision; the rest is held out.",
            rich_help_panel=_SEARCH,
        ),
    ] = "60%",
    *,
    settings: Table,
) -> None:
    """Search order, admission and batch limits for a workload on given hardware, in virtual time.

    The scenario is written as for `shoal simulate`; its own scheduler is the default for comparison. Many
    schedulers are tried on a small part of the workload, the best third on three times as much, and so on
    (successive halving). The latest quarter of the requests of the search is kept for a comparison of the
    best with the default, which it replaces if it is better with 95% confidence. The reported figures are of
    held-out later requests, on which nothing was decided.

    The best scheduler meets most goals of the services (`slo`); ties are decided by latency. Without goals
    only latency counts. Ctrl-C ends the search early, with the rounds so far.

    **Examples:**

    `shoal tune --config scenario.yaml --out scheduler.yaml`

    `shoal tune --config scenario.yaml --trace azure.csv --rate 6.45 --trials 243`

    `shoal serve smollm2 --config scheduler.yaml`
    """
    from rich.console import Console

    from shoal.cli.progress import ProgressDisplay
    from shoal.cli.simulate_view import facts_table
    from shoal.cli.tune_page import tune_page
    from shoal.cli.tune_report import print_stopped, print_tuned, stopped_json, tuned_json
    from shoal.config.scenario_file import load_scenario
    from shoal.config.scenario_run import prepare
    from shoal.config.scheduler_yaml import scheduler_settings, to_yaml
    from shoal.measure import require_plots
    from shoal.measure.page import page_html
    from shoal.plan.tune import Search, Stopped, tune

    check_outputs(out, html, json_path)
    if html is not None:
        require_plots()
    scenario = load_scenario(file=config, flags=settings)
    search = Search(
        trials=trials,
        share=parse_share(search_share, "--search-share", whole=False),
        seed=scenario.workload.seed,
    )
    prepared = prepare(scenario)
    console = Console(stderr=STANDARD_OUTPUT in (out, html, json_path))
    console.print(facts_table(prepared.facts))
    with ProgressDisplay() as progress:
        try:
            tuned = tune(prepared, search, progress.update)
        except Stopped as stop:
            progress.stop()
            written = write_texts([(json_path, json_text(stopped_json(stop, scenario.preset)))])
            print_stopped(console, stop, scenario.scheduler)
            print_written(console, written)
            raise
    text = to_yaml({"scheduler": scheduler_settings(tuned.best, scenario.preset)})
    results = [(out, text), (json_path, json_text(tuned_json(tuned, scenario.preset)))]
    if html is not None:
        page = tune_page(tuned, scenario.scheduler, prepared.subject, prepared.facts)
        results.append((html, page_html(page)))
    written = write_texts(results)
    print_tuned(console, tuned, scenario.scheduler)
    if out is None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    print_written(console, written)
