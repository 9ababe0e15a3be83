"""Command line of ``python -m experiments``: runs experiments, writes tables, JSON and pictures."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.command import Command
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, output_file
from shoal.core import ConfigError

if TYPE_CHECKING:
    from experiments import Result

EVERYTHING = "all"

app = typer.Typer(
    name="experiments",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command)
def experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Experiments to run, or `all` that are simulated.", show_default=False
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller runs with rougher figures.")] = False,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Write the result as JSON, several as a list; - is standard output.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FOLDER", help="Draw a NAME.png for each into this folder."),
    ] = None,
) -> None:
    """Run experiments of the papers, most in simulation, and print the papers' figures with ours.

    Below each row of ours are the paper's figures for it, if it prints any. Assumptions list what the
    paper leaves open, and which results differ, and why.

    **Examples:**

    `python -m experiments --list`

    `python -m experiments scls-throughput --json scls.json --plot pictures`

    `python -m experiments all --quick`
    """
    from rich.console import Console

    from experiments import REPRODUCTIONS, Effort, find
    from experiments.report import list_table, print_result
    from shoal.cli.progress import ProgressDisplay
    from shoal.measure import require_plots, save_plot

    console = Console(stderr=json_path == STANDARD_OUTPUT)
    if listed or not names:
        console.print(list_table(list(REPRODUCTIONS.values())))
        return
    every = [name for name, each in REPRODUCTIONS.items() if not each.real]
    selected = find(every if EVERYTHING in names else list(dict.fromkeys(names)))
    check_outputs(json_path, folder=plot)
    if plot is not None:
        require_plots()
        _make_folder(plot)
    results = []
    for reproduction in selected:
        with ProgressDisplay() as progress:
            result = reproduction.run(Effort(quick=quick, progress=progress.update))
        results.append(result)
        print_result(console, result, quick)
        if plot is not None and result.panels:
            save_plot(plot / f"{result.name}.png", result.panels, result.paper)
        # The file is written after each experiment, so that an interruption loses only the unfinished ones.
        if json_path is not None and (json_path != STANDARD_OUTPUT or len(results) == len(selected)):
            _write(json_path, results, quick=quick, single=len(selected) == 1)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} for pictures: {error}") from error


def _write(path: Path, results: "list[Result]", *, quick: bool, single: bool) -> None:
    written: Any = [result.to_json() | {"quick": quick} for result in results]
    with output_file(path) as file:
        file.write_text(json.dumps(written[0] if single else written, indent=2) + "\n", encoding="utf-8")
