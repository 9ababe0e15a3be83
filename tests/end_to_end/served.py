"""A real server, over HTTP, whose engine process checks its pool whenever it is asked for stats."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from inline_codecs import Inlined
from routers import start_router
from shoal.cluster.router.router import Router
from shoal.engine import EngineOptions
from shoal.serve import ServerOptions, StopSignal, serve_until_stopped

Scenario = Callable[[httpx.AsyncClient, Router], Awaitable[None]]


def run_served(
    options: EngineOptions,
    folders: Mapping[str, Path],
    tokenizers: Mapping[str, Any],
    scenario: Scenario,
    builder: str = "checked_engine:build_checked_engine",
    *,
    engines: int = 1,
) -> None:
    """Run ``scenario`` against the server, then stop it; ``builder``'s module must be importable there."""

    async def main() -> None:
        router = await start_router(options, folders, tokenizers, builder, engines=engines)
        codecs = {name: Inlined(tokenizer) for name, tokenizer in tokenizers.items()}
        stop, ready = StopSignal(), asyncio.get_running_loop().create_future()
        serving = serve_until_stopped(
            router, codecs, options.services, ServerOptions(port=0), stop, ready.set_result
        )
        server = asyncio.create_task(serving)
        try:
            async with httpx.AsyncClient(base_url=await ready, timeout=600) as client:
                await scenario(client, router)
        finally:
            stop.request()
            await server
            await router.close()

    asyncio.run(main())
