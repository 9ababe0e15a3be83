"""``shoal profile``: measure step times on this device and fit latency models to them."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, json_text, output_file
from shoal.config import ENGINE_FLAGS, load_config
from shoal.config.setting_tree import Table
from shoal.core import ConfigError

if TYPE_CHECKING:
    from shoal.cli.profile_links import LinkReport
    from shoal.cli.profile_report import ProfileReport
    from shoal.engine import EngineOptions
    from shoal.execute.protocol import Executor
    from shoal.profile.grid import Grid


class GridName(StrEnum):
    quick = "quick"
    full = "full"


@with_flags(ENGINE_FLAGS, models=True)
def profile(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write the fitted models as JSON; - is standard output."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw predicted against measured times (png, svg)."),
    ] = None,
    grid: Annotated[
        GridName,
        typer.Option(help="What to measure: quick takes about a minute for each small model on a CPU."),
    ] = GridName.quick,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of the service's mean request.")
    ] = 256,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Output length of the service's mean request.")
    ] = 128,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="PATH", help="Also write what is printed as JSON; - is standard output."
        ),
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Instead, measure how fast requests migrate between two engines of this machine, and print "
            "budgets for migrations (cluster.packing.budgets).",
        ),
    ] = False,
    share: Annotated[
        float,
        typer.Option(min=0.001, max=1.0, help="With --links: share of an engine's time for migrations."),
    ] = 0.1,
    config: ConfigFile = None,
    *,
    settings: Table,
) -> None:
    """Measure how long steps take on this device, and fit the models that forecast it.

    Runs synthetic prompts through the real engine, with as many threads as `shoal serve` gives it. Fits step
    times to what a step computes, and SCLS's formulas to padded batches. Prints the errors of the fits, also
    over whole slices that they have not seen, and each service's `execution`: the time that its mean request
    takes alone, for the configuration file.

    **Examples:**

    `shoal profile smollm2 gemma3-270m --out latency.json`

    `shoal profile smollm2 --grid full --plot latency.png --prompt-tokens 512 --output-tokens 64`

    `shoal profile smollm2 --links`
    """
    from rich.console import Console

    from shoal.cli.profile_links import measure_links
    from shoal.cli.profile_report import profile_panels, report_tables
    from shoal.forecast import save_profile
    from shoal.measure import require_plots, save_plot
    from shoal.models import check_service
    from shoal.profile.grid import GRIDS
    from shoal.serve.options import ServerOptions

    check_outputs(out, json_path, picture=plot)
    if links and (out is not None or plot is not None):
        raise ConfigError("--links fits nothing and draws nothing: leave out --out and --plot")
    if plot is not None:
        require_plots()
    loaded = load_config(ServerOptions, file=config, flags=settings)
    options = loaded.engine_options()
    for service in options.services:
        check_service(service)
    if links:
        _profile_links(measure_links(options, loaded.cluster.packing.epoch_s, share), json_path)
        return
    report = _measure(options, GRIDS[grid], prompt_tokens, output_tokens)
    console = Console(markup=False, stderr=STANDARD_OUTPUT in (out, json_path))
    for table in report_tables(report):
        console.print(table)
    if out is not None:
        with output_file(out) as path:
            save_profile(report.to_profile(), path)
    if plot is not None:
        save_plot(plot, profile_panels(report), f"Step times on {report.place}")
    if json_path is not None:
        with output_file(json_path) as path:
            path.write_text(json_text(report.to_json()), encoding="utf-8")


def _profile_links(report: "LinkReport", json_path: Path | None) -> None:
    """Print migration rates and budgets."""
    from rich.console import Console

    console = Console(markup=False, stderr=json_path == STANDARD_OUTPUT)
    console.print(report.table())
    console.print(f"Budgets for migrations that take {report.share:.3g} of an engine's time:")
    console.print(report.snippet(), soft_wrap=True)
    if json_path is not None:
        with output_file(json_path) as path:
            path.write_text(json_text(report.to_json()), encoding="utf-8")


def _measure(
    options: "EngineOptions", grid: "Grid", prompt_tokens: int, output_tokens: int
) -> "ProfileReport":
    """Load all services into an engine, and measure each."""
    from shoal.cli.profile_report import ProfileReport
    from shoal.cli.progress import ProgressDisplay
    from shoal.engine import build_engine
    from shoal.models import resolve_service
    from shoal.profile.measure import Profiler, RowsRecorder, profiling_options

    options = profiling_options(options)
    recorders: list[RowsRecorder] = []

    def record(executor: "Executor") -> RowsRecorder:
        recorders.append(RowsRecorder(executor))
        return recorders[0]

    with ProgressDisplay() as progress:
        folders = {s.name: resolve_service(s, progress.update) for s in options.services}
        engine, info = build_engine(options, folders, progress=progress.message, wrap=record)
        try:
            profiler = Profiler(engine, recorders[0], options)
            measured = {
                name: profiler.measure(
                    name, info.services[name], grid, partial(progress.update, f"profiling {name}")
                )
                for name in info.services
            }
        finally:
            engine.close()
    return ProfileReport.of(measured, info.device, info.threads, prompt_tokens, output_tokens)
