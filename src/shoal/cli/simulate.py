"""``shoal simulate``: simulate a scenario in virtual time, and write its results."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import ConfigFile, scenario_defaults, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, output_file, print_written
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.setting_tree import Table

if TYPE_CHECKING:
    from shoal.measure import RunRecord

_RESULTS = "Results"
_MEASURED = "Against a measured run"


@with_flags(SCENARIO_FLAGS, defaults=scenario_defaults)
def simulate(
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Write everything: summary, requests, samples, report.html, trace.json.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report, one page.", rich_help_panel=_RESULTS),
    ] = None,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(
            "--chrome-trace",
            metavar="FILE",
            help="Write every step and request for Perfetto (ui.perfetto.dev).",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Write the summary as JSON; - is standard output.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    skip_ahead: Annotated[
        bool,
        typer.Option(
            "--skip-ahead/--no-skip-ahead",
            help="Simulate runs of decode steps at once; the results are the same.",
            rich_help_panel=_RESULTS,
        ),
    ] = True,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            metavar="LOG",
            help="Simulate the requests of a measured run (JSON lines), and show both runs side by side.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    compare_plot: Annotated[
        Path | None,
        typer.Option(
            "--compare-plot",
            metavar="FILE",
            help="Draw the distributions of both runs (png, svg, pdf); also in the folder of --out.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    fit_overhead: Annotated[
        Path | None,
        typer.Option(
            "--fit-overhead",
            metavar="LOG",
            help="Fit what the host adds to steps to a measured run, and simulate with it.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    fit_requests: Annotated[
        int | None,
        typer.Option(
            "--fit-requests",
            metavar="N",
            min=1,
            help="Fit to the times of the first N requests of the log only.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    *,
    settings: Table,
) -> None:
    """Serve a workload in virtual time: the real scheduler and KV accounting, with step times from a model.

    The scenario has the workload (a trace, or drawn lengths and arrivals), the services, their step times,
    and the memory. It comes from a file, from flags, or from both; flags override the file. The same
    scenario gives the same results, byte for byte. Ctrl-C ends it early, with the figures so far.

    **Examples:**

    `shoal simulate --model llama-3.1-8b --device a100-80 --workload sharegpt --rate 8 --requests 2000`

    `shoal simulate --config scenario.yaml --trace azure.csv --rate 6.45 --engines 4 --out results`

    `shoal simulate --config scenario.yaml --preset past-future --html past-future.html`

    `shoal simulate --config vllm.yaml --compare measured.jsonl --compare-plot both.png`
    """
    from rich.console import Console

    from shoal.cli.simulate_measured import MeasuredRun
    from shoal.cli.simulate_view import SimulationProgress, print_run
    from shoal.config.scenario_run import prepare
    from shoal.measure import require_plots

    check_outputs(html, chrome_trace, json_path, picture=compare_plot, folder=out)
    if any(path is not None for path in (out, html, compare_plot)):
        require_plots()
    measured = MeasuredRun(compare, compare_plot, fit_overhead, fit_requests)
    console = Console(stderr=STANDARD_OUTPUT in (html, chrome_trace, json_path))
    prepared = prepare(measured.load(console, config, settings))
    spans = out is not None or chrome_trace is not None
    with SimulationProgress(len(prepared.requests)) as progress:
        start_s = time.perf_counter()
        run = prepared.run(
            skip_ahead=skip_ahead, spans=spans, progress=progress.update, stop=progress.stopped
        )
        elapsed_s = time.perf_counter() - start_s
    files = _write(run, out, html, chrome_trace, json_path)
    print_run(console, run, elapsed_s)
    if progress.stopped():
        print_written(console, files)
        raise KeyboardInterrupt
    print_written(console, files + measured.show(console, prepared, run, out))


def _write(
    run: "RunRecord", out: Path | None, html: Path | None, chrome_trace: Path | None, json_path: Path | None
) -> list[Path]:
    """Write the requested files; returns their paths."""
    from shoal.measure import write_report, write_run, write_summary, write_trace

    written = [] if out is None else write_run(run, out)
    for path, write in ((html, write_report), (chrome_trace, write_trace), (json_path, write_summary)):
        if path is not None:
            with output_file(path) as file:
                write(run, file)
        if path not in (None, STANDARD_OUTPUT):
            written.append(path)
    return written
