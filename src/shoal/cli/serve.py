"""``shoal serve``: models behind OpenAI's HTTP API."""

import asyncio
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as Grid

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.progress import Waiting
from shoal.config import ENGINE_FLAGS, SERVER_FLAGS
from shoal.config.nodes import Table
from shoal.core import Service
from shoal.kvcache.options import KVCacheOptions


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

    chosen = load_config(ServerOptions, file=config, flags=settings)
    console = Console(stderr=True)
    summaries: set[asyncio.Task[None]] = set()
    with Waiting(console) as waiting:

        def ready(url: str) -> None:
            waiting.stop()
            summary = print_summary(url, chosen.services, chosen.kv_cache, console)
            summaries.add(asyncio.get_running_loop().create_task(summary))

        run_server(
            chosen.engine_options(),
            chosen.server,
            fetching=waiting.advance,
            loading=waiting.say,
            ready=ready,
        )


async def print_summary(
    url: str, services: Sequence[Service], cache: KVCacheOptions, console: Console
) -> None:
    """Say what the server at ``url`` serves and how to ask it; it is asked itself, so this is true."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    from shoal.cli.budget import budget_tokens
    from shoal.models import resolve_model

    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        cards = (await client.get("/v1/models")).raise_for_status().json()["data"]
        page = (await client.get("/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    pool = sum(s.value for s in samples if s.name == "shoal_kv_bytes" and s.labels.get("use") == "total")
    longest = {card["id"]: card["max_model_len"] for card in cards}
    grid = Grid.grid(padding=(0, 2))
    folders = {service: await asyncio.to_thread(resolve_model, service.model) for service in services}
    budgets = budget_tokens(folders, cache, int(pool))
    for service in services:
        grid.add_row(
            f"  [bold]{service.name}[/]",
            service.model,
            f"{longest[service.name]:,} tokens a request",
            f"KV for {budgets[service.name]:,} tokens",
        )
    console.print("[bold]services[/]", grid, sep="\n")
    console.print(f"[bold]KV pool[/]  {pool / 2**20:,.1f} MiB, shared by all services")
    console.print(f"[bold]ready[/]    {url}   (Ctrl-C to stop)")
    example = curl_example(url, services[0].name)
    console.print(example, soft_wrap=True, highlight=False, markup=False)


def curl_example(url: str, service: str) -> str:
    """A completion request that works with any model."""
    body = json.dumps({"model": service, "prompt": "The capital of France is", "max_tokens": 16})
    return f"try      curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
