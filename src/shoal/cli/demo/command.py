"""``shoal demo``: serves two real models from one engine or two, and measures them over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import check_outputs


def demo(
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Prompts to send at once.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Typical length of an answer.")] = 96,
    chat_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Share of the prompts that are chats.")
    ] = 0.75,
    kv_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="KV pool; small by default, so that it really fills up.")
    ] = "24MiB",
    weights_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for weights of the shared engine: 700MiB holds one model at a time."
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Scheduler, as in `shoal serve`, such as vllm or seallm-join.")
    ] = "shoal",
    compare: Annotated[
        bool,
        typer.Option(help="Also send the burst to an engine for each model, and to one with less memory."),
    ] = True,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="Serve from two engines, and kill one during the burst."),
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Also write the figures as JSON; - is standard output."),
    ] = None,
) -> None:
    """Serve two bundled models from one engine and send both a burst of real prompts.

    Fetches the models on first use. Times one request of each service alone, shows the responses of the burst
    as they stream, and then latencies, normalised latency (E2E over that of a request alone), SLO attainment,
    preemptions and memory use. Then the same burst goes to two engines of one model each, with half of the
    cores and memory each, and to one engine whose memory holds the weights of one model at a time, unless
    `--no-compare` or `--kill` is given.

    Exit code 0 means that every request finished. With `--kill`, requests of the killed engine continue on
    the other one.

    **Examples:**

    `shoal demo`

    `shoal demo --chat-share 0.5`

    `shoal demo --kill`

    `shoal demo --weights-memory 700MiB --no-compare`

    `shoal demo --requests 48 --kv-memory 16MiB --preset vllm --json demo.json`
    """
    from shoal.cli.demo.prompts import demo_prompts
    from shoal.cli.demo.run import DemoSetup, run_demo
    from shoal.config import parse_size

    check_outputs(json_path)

    def read(size: str, flag: str) -> int:
        try:
            return parse_size(size)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from None

    setup = DemoSetup(
        kv_bytes=read(kv_memory, "--kv-memory"),
        weight_bytes=None if weights_memory is None else read(weights_memory, "--weights-memory"),
        preset=preset,
        kill=kill,
        compare=compare and not kill,
    )
    if not run_demo(demo_prompts(requests, max_tokens, chat_share), setup, json_path):
        raise typer.Exit(1)
