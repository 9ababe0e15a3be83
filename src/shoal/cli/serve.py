"""``shoal serve``: models behind OpenAI's HTTP API."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.progress import ProgressDisplay
from shoal.config import CLUSTER_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS
from shoal.config.nodes import Table
from shoal.config.other_flags import VARIABLES

if TYPE_CHECKING:
    from shoal.cluster.status import EngineStatus
    from shoal.engine import EngineInfo
    from shoal.serve.backend import Backend


@with_flags(MODEL_FLAGS + ENGINE_FLAGS + CLUSTER_FLAGS + SERVER_FLAGS, models=True)
def serve(config: ConfigFile = None, *, settings: Table) -> None:
    """Serve one or more models over OpenAI's HTTP API, from one engine with one KV pool or from several.

    **Examples:**

    `shoal serve smollm2 gemma3-270m`

    `shoal serve --service chat=smollm2,slo.ttft=2s --service complete=gemma3-270m --kv-memory 1GiB`

    `shoal serve smollm2 --device cpu --device cpu`

    `shoal serve --config shoal.yaml --port 9000`
    """
    from shoal.config import load_config
    from shoal.serve import ServerOptions
    from shoal.serve.exposure import exposure
    from shoal.serve.launch import run_server

    options = load_config(ServerOptions, file=config, flags=settings)
    console = Console(stderr=True)
    print_without_effect(os.environ, console)
    with ProgressDisplay(console) as progress:

        def on_ready(url: str, backend: "Backend") -> None:
            progress.stop()
            print_access(exposure(options.server, urlsplit(url).hostname or ""), console)
            print_summary(url, backend.engines, console, keyed=bool(options.server.named_api_keys()))

        run_server(
            options.engine_plans(),
            options.server,
            options.cluster,
            on_download=progress.update,
            on_load=progress.message,
            on_ready=on_ready,
        )


def print_without_effect(environment: Mapping[str, str], console: Console) -> None:
    """Print which variables of other servers are set, and what is written here instead."""
    for name, instead in VARIABLES.items():
        if name in environment:
            note = Text.assemble(("note", "bold"), f"     {name} has no effect here; write {instead}")
            console.print(note, soft_wrap=True)


def print_access(access: Mapping[str, str], console: Console) -> None:
    """Print who may use which routes, a line for each."""
    for what, who in access.items():
        console.print(Text.assemble(("open", "bold"), f"     {what}: {who}"), soft_wrap=True)


def print_summary(
    url: str, engines: Sequence["EngineStatus"], console: Console, *, keyed: bool = False
) -> None:
    """Print what the engines at ``url`` serve, and an example of a request; keyed: requests need a key."""
    infos = {engine.name: engine.info for engine in engines if engine.info is not None}
    services = _print_services(list(infos.values()), console)
    for kernels in dict.fromkeys(info.kernels for info in infos.values()):
        console.print(Text.assemble(("compute", "bold"), f"  {kernels}"), soft_wrap=True)
    for name, info in infos.items():
        pool = f"{info.kv_bytes / 2**20:,.1f} MiB"
        most = "" if info.max_running is None else f"; at most {info.max_running:,} requests run at once"
        if len(infos) == 1:
            console.print(f"[bold]KV pool[/]  {pool}, shared by all services{most}")
            break
        what = f"   {name}  {info.device}, {info.threads} threads, KV pool {pool}: {', '.join(info.services)}"
        console.print(Text.assemble(("engine", "bold"), what, most), soft_wrap=True)
    console.print(Text.assemble(("ready", "bold"), f"    {url}   (Ctrl-C to stop)"))
    console.print(curl_example(url, services[0], keyed=keyed), soft_wrap=True, highlight=False, markup=False)


def _print_services(infos: Sequence["EngineInfo"], console: Console) -> list[str]:
    """A line for each service; returns their names."""
    names = list(dict.fromkeys(name for info in infos for name in info.services))
    grid = Grid.grid(padding=(0, 2))
    for name in names:
        hosts = [info.services[name] for info in infos if name in info.services]
        grid.add_row(
            Text(f"  {name}", style="bold"),
            Text(hosts[0].model),
            f"{max(service.max_total_tokens for service in hosts):,} tokens a request",
            f"KV for {' + '.join(f'{service.kv_tokens:,}' for service in hosts)} tokens",
        )
    console.print("[bold]services[/]", grid, sep="\n")
    return names


def curl_example(url: str, service: str, *, keyed: bool = False) -> str:
    """A curl command for a completion, which works with any model."""
    body = json.dumps({"model": service, "prompt": "The capital of France is", "max_tokens": 16})
    key = " -H 'Authorization: Bearer API_KEY'" if keyed else ""
    return f"try      curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'"
