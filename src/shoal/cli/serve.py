"""``shoal serve``: models behind OpenAI's HTTP API."""

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.progress import ProgressDisplay
from shoal.config import ENGINE_FLAGS, SERVER_FLAGS
from shoal.config.nodes import Table

if TYPE_CHECKING:
    from shoal.engine import EngineInfo


@with_flags(ENGINE_FLAGS + SERVER_FLAGS, models=True)
def serve(config: ConfigFile = None, *, settings: Table) -> None:
    """Serve one or more models over OpenAI's HTTP API, from one engine and one KV pool.

    **Examples:**

    `shoal serve smollm2 gemma3-270m`

    `shoal serve --service chat=smollm2,slo.ttft=2s --service complete=gemma3-270m --kv-memory 1GiB`

    `shoal serve --config shoal.yaml --port 9000`
    """
    from shoal.config import load_config
    from shoal.serve import ServerOptions
    from shoal.serve.launch import run_server

    options = load_config(ServerOptions, file=config, flags=settings)
    console = Console(stderr=True)
    with ProgressDisplay(console) as progress:

        def on_ready(url: str, info: "EngineInfo") -> None:
            progress.stop()
            print_summary(url, info, console)

        run_server(
            options.engine_options(),
            options.server,
            on_download=progress.update,
            on_load=progress.message,
            on_ready=on_ready,
        )


def print_summary(url: str, info: "EngineInfo", console: Console) -> None:
    """Print the services at ``url``, and an example of a request."""
    grid = Grid.grid(padding=(0, 2))
    for name, service in info.services.items():
        grid.add_row(
            Text(f"  {name}", style="bold"),
            Text(service.model),
            f"{service.max_total_tokens:,} tokens a request",
            f"KV for {service.kv_tokens:,} tokens",
        )
    console.print("[bold]services[/]", grid, sep="\n")
    running = "" if info.max_running is None else f"; at most {info.max_running:,} requests run at once"
    console.print(Text.assemble(("compute", "bold"), f"  {info.kernels}"), soft_wrap=True)
    console.print(f"[bold]KV pool[/]  {info.kv_bytes / 2**20:,.1f} MiB, shared by all services{running}")
    console.print(Text.assemble(("ready", "bold"), f"    {url}   (Ctrl-C to stop)"))
    example = curl_example(url, next(iter(info.services)))
    console.print(example, soft_wrap=True, highlight=False, markup=False)


def curl_example(url: str, service: str) -> str:
    """A curl command for a completion, which works with any model."""
    body = json.dumps({"model": service, "prompt": "The capital of France is", "max_tokens": 16})
    return f"try      curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
