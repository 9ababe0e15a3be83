"""``shoal bench``: send a workload to a server with OpenAI's API, and report latencies and throughput."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import ConfigFile, scenario_defaults, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs
from shoal.config.scenario_flags import WORKLOAD_FLAGS
from shoal.config.setting_tree import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.core import SLO

_SERVER, _GOALS, _RESULTS = "Server", "Goals", "Results"


@with_flags(WORKLOAD_FLAGS, defaults=scenario_defaults, services=False)
def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the server; any that has OpenAI's API.")
    ] = "http://127.0.0.1:8000",
    config: ConfigFile = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model to ask; may be repeated. Without it all that the server has.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="SHOAL_API_KEY", help="An API key of the server.", rich_help_panel=_SERVER
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send chats instead of texts to complete.", rich_help_panel=_SERVER),
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for outputs of the workload's length; not all servers can.", rich_help_panel=_SERVER
        ),
    ] = True,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Goal for the first token: 500ms.", rich_help_panel=_GOALS),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Goal for each further token: 50ms.", rich_help_panel=_GOALS),
    ] = None,
    mtpot: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Goal for the longest time between two tokens: 1s.", rich_help_panel=_GOALS
        ),
    ] = None,
    e2e: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Goal for the whole answer: 10s.", rich_help_panel=_GOALS),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Look for the highest rate that the server sustains, from --rate on."),
    ] = False,
    sweep_steps: Annotated[int, typer.Option(metavar="N", min=0, help="Steps to narrow that rate down.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Write everything: summary, requests, report.html, vllm.json.",
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
    vllm_json: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write what `vllm bench serve --save-result` would.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    *,
    settings: Table,
) -> None:
    """Send the requests of a workload to a running server, and time their streams.

    The workload is that of `shoal simulate`: drawn lengths or a trace, sent at a rate, or by clients that
    wait for each answer before they ask again. Without one, 100 requests with the lengths of ShareGPT come at
    1 a second. Prompts are common words, about as many as the workload has tokens; the tokens reported are
    those that the server counted. Ctrl-C ends it early, with the figures so far.

    **Examples:**

    `shoal bench`

    `shoal bench http://127.0.0.1:8000 --rate 4 --requests 200 --ttft 1s --tpot 100ms`

    `shoal bench --model chat --model code --workload sharegpt --clients 16 --chat --out results`

    `shoal bench --rate 1 --sweep --ttft 1s`

    `shoal simulate --config scenario.yaml --compare results/requests.jsonl`
    """
    from rich.console import Console

    from shoal.cli.bench_run import Bench
    from shoal.config.scenario_file import load_workload
    from shoal.measure import require_plots

    check_outputs(json_path, vllm_json, folder=out)
    if out is not None:
        require_plots()
    console = Console(stderr=STANDARD_OUTPUT in (json_path, vllm_json))
    Bench(
        console=console,
        url=url,
        models=tuple(model or ()),
        api_key=api_key,
        chat=chat,
        extra={"ignore_eos": True} if ignore_eos else {},
        workload=load_workload(file=config, flags=settings),
        slo=_goals({"ttft": ttft, "tpot": tpot, "mtpot": mtpot, "e2e": e2e}),
        sweep_steps=sweep_steps if sweep else None,
    ).run(out, json_path, vllm_json)


def _goals(flags: "Mapping[str, str | None]") -> "SLO":
    from shoal.config import parse_duration
    from shoal.core import SLO, ConfigError, slo_problem

    def read(flag: str, text: str | None) -> float | None:
        try:
            return None if text is None else parse_duration(text)
        except ValueError as error:
            raise ConfigError(f"--{flag}: {error}") from None

    slo = SLO(**{f"{flag}_s": read(flag, text) for flag, text in flags.items()})
    if found := slo_problem(slo, 1.0):
        raise ConfigError(f"--{found[0]}: {found[1]}")
    return slo
