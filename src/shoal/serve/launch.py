"""Starts a server from its options: models, tokenizers, engine process, HTTP."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.core import EngineDied
from shoal.engine import EngineHandle, EngineInfo, EngineOptions
from shoal.engine.child import check_open_files
from shoal.engine.sampling import with_sampling_defaults
from shoal.models import Progress, Tokenizer, check_model, resolve_model
from shoal.serve.keys import Keyring
from shoal.serve.lifecycle import StopSignal
from shoal.serve.options import ServerOptions
from shoal.serve.server import check_address, serve_until_stopped
from shoal.serve.workers import WorkerProcesses


def run_server(
    engine: EngineOptions,
    options: ServerOptions,
    *,
    on_download: Progress | None = None,
    on_load: Callable[[str], None] | None = None,
    on_ready: Callable[[str, EngineInfo], None] | None = None,
) -> None:
    """Download missing models, start the engine and serve until SIGTERM or SIGINT; main thread only.

    on_download, on_load: called with the progress of the start. on_ready: called with the base URL and the
    facts of the engine. Raises ConfigError, ModelUnavailable, ModelUnsupported or EngineDied if the start
    fails, and EngineDied if the engine ends. An address in use and a model that cannot exist are found before
    any download.
    """
    check_open_files()
    check_address(options)
    Keyring(options.named_api_keys(), [service.name for service in engine.services])  # finds mistakes early
    for service in engine.services:
        check_model(service.model)
    folders = {service.name: resolve_model(service.model, on_download) for service in engine.services}
    engine = replace(engine, services=with_sampling_defaults(engine.services, folders))
    tokenizers = {
        service.name: Tokenizer.from_folder(folders[service.name], service.chat_template)
        for service in engine.services
    }
    for tokenizer in tokenizers.values():
        tokenizer.least_tokens("")  # reads the vocabulary once, so that no request waits for it
    # Not uvloop: Ctrl-C in a terminal would reach the child processes that it starts.
    asyncio.run(_run(engine, options, folders, tokenizers, on_load, on_ready))


async def _run(
    engine: EngineOptions,
    options: ServerOptions,
    folders: Mapping[str, Path],
    tokenizers: Mapping[str, Tokenizer],
    on_load: Callable[[str], None] | None,
    on_ready: Callable[[str, EngineInfo], None] | None,
) -> None:
    stop = StopSignal()
    workers = WorkerProcesses()
    with stop.on_signals():
        warming = asyncio.create_task(workers.start())
        starting = asyncio.create_task(EngineHandle.start(engine, folders, tokenizers, on_load))
        stop_requested = asyncio.create_task(stop.drain.wait())
        await asyncio.wait((starting, stop_requested), return_when=asyncio.FIRST_COMPLETED)
        stop_requested.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
        if starting.cancelled() or starting.exception():
            warming.cancel()
            await asyncio.wait((warming,))
        if starting.cancelled():
            return
        handle = starting.result()
        engine_death = asyncio.create_task(handle.wait_died())
        engine_death.add_done_callback(lambda _: stop.ask())
        try:
            await warming
            notify = None if on_ready is None else partial(_notify_ready, on_ready, handle.info)
            await serve_until_stopped(handle, tokenizers, engine.services, options, stop, notify, workers)
            if engine_death.done():
                raise EngineDied(f"{engine_death.result()}, so the server ended too")
        finally:
            engine_death.cancel()
            await handle.close()


def _notify_ready(on_ready: Callable[[str, EngineInfo], None], info: EngineInfo, url: str) -> None:
    on_ready(url, info)
