"""``shoal demo``: two real models served from one engine or two, measured through HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import check_outputs


def demo(
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Prompts to send at once.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Typical length of an answer.")] = 96,
    kv_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="KV pool; small by default, so that it really fills up.")
    ] = "24MiB",
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Scheduler, as in `shoal serve`, such as vllm or seallm-join.")
    ] = "shoal",
    kill: Annotated[
        bool, typer.Option("--kill", help="Serve from two engines, and kill one amid the burst.")
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Also write the figures as JSON; - is standard output."),
    ] = None,
) -> None:
    """Serve two bundled models from one engine and send both a burst of real prompts.

    Fetches the models on first use. Times one request of each service alone, then shows the answers of the
    burst as they stream, and ends with latencies, normalised latency (times what a request takes alone), SLO
    attainment, preemptions and memory use. Exit code 0 means that every request finished: with `--kill` also
    those of the engine that was killed, whose streams go on with the other one.

    **Examples:**

    `shoal demo`

    `shoal demo --kill`

    `shoal demo --requests 48 --kv-memory 16MiB --preset vllm --json demo.json`
    """
    from shoal.cli.demo_run import run_demo

    check_outputs(json_path)

    flags = [f"--kv-memory={kv_memory}", f"--preset={preset}"]
    finished = run_demo(requests, max_tokens, flags, json_path, kill)
    if not finished:
        raise typer.Exit(1)
