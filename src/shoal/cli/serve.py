"""``shoal serve``: serve models over OpenAI's HTTP API."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.progress import ProgressDisplay
from shoal.cli.start_summary import print_access, print_addresses, print_batching, print_engines
from shoal.config import CLUSTER_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS
from shoal.config.foreign_flags import VARIABLES
from shoal.config.setting_tree import Table

if TYPE_CHECKING:
    from shoal.serve.backend import Backend, TextCodec


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
    from shoal.serve.http.exposure import exposure
    from shoal.serve.launch import run_server

    options = load_config(ServerOptions, file=config, flags=settings)
    console = Console(stderr=True)
    print_ignored_variables(os.environ, console)
    with ProgressDisplay(console) as progress:

        def on_ready(url: str, backend: "Backend", codecs: Mapping[str, "TextCodec"]) -> None:
            progress.stop()
            print_access(exposure(options.server, urlsplit(url).hostname or ""), console)
            print_engines(backend.services, backend.engines, console)
            if options.cluster.batching is not None:
                print_batching(options.cluster.batching, console)
            chats = [name for name, codec in codecs.items() if codec.has_chat_template]
            keyed = bool(options.server.named_api_keys())
            print_addresses(url, next(iter(backend.services)), console, chats=chats, keyed=keyed)

        run_server(
            options.engine_plans(),
            options.server,
            options.cluster,
            on_download=progress.update,
            on_load=progress.message,
            on_ready=on_ready,
        )


def print_ignored_variables(environment: Mapping[str, str], console: Console) -> None:
    """Print which environment variables of other servers are set, and what Shoal uses instead."""
    for name, instead in VARIABLES.items():
        if name in environment:
            note = Text.assemble(("note", "bold"), f"     {name} has no effect here; write {instead}")
            console.print(note, soft_wrap=True)
