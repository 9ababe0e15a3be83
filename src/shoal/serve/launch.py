"""From options to a running server: models, tokenizers, engine process, HTTP."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.core import EngineDied
from shoal.engine import EngineHandle, EngineInfo, EngineOptions
from shoal.engine.launch import check_open_files
from shoal.engine.sampling import with_sampling_defaults
from shoal.models import Progress, Tokenizer, check_model, resolve_model
from shoal.serve.lifecycle import StopSignal
from shoal.serve.options import ServerOptions
from shoal.serve.server import check_address, serve_until_stopped
from shoal.serve.workers import WorkerProcesses


def run_server(
    engine: EngineOptions,
    options: ServerOptions,
    *,
    fetching: Progress | None = None,
    loading: Callable[[str], None] | None = None,
    ready: Callable[[str, EngineInfo], None] | None = None,
) -> None:
    """Fetch what is missing, start the engine and serve until SIGTERM or SIGINT; main thread only.

    Ends too when the engine does, with EngineDied.

    fetching and loading are told how the start goes, ready gets the base URL and what the
    engine tells about itself. Raises ConfigError, ModelUnavailable, ModelUnsupported or EngineDied if
    the start fails; an address in use and a model that cannot be are noticed before anything is fetched.
    """
    check_open_files()
    check_address(options)
    for service in engine.services:
        check_model(service.model)
    folders = {service.name: resolve_model(service.model, fetching) for service in engine.services}
    engine = replace(engine, services=with_sampling_defaults(engine.services, folders))
    tokenizers = {
        service.name: Tokenizer.from_folder(folders[service.name], service.chat_template)
        for service in engine.services
    }
    for tokenizer in tokenizers.values():
        tokenizer.least_tokens("")  # reads all of the vocabulary once; requests should not wait for that
    # Not uvloop's: children that it starts would be open to the Ctrl-C of a terminal.
    asyncio.run(_run(engine, options, folders, tokenizers, loading, ready))


async def _run(
    engine: EngineOptions,
    options: ServerOptions,
    folders: Mapping[str, Path],
    tokenizers: Mapping[str, Tokenizer],
    loading: Callable[[str], None] | None,
    ready: Callable[[str, EngineInfo], None] | None,
) -> None:
    stop = StopSignal()
    workers = WorkerProcesses()
    with stop.on_signals():
        warming = asyncio.create_task(workers.start())
        starting = asyncio.create_task(EngineHandle.start(engine, folders, tokenizers, loading))
        asked = asyncio.create_task(stop.drain.wait())
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
        if starting.cancelled() or starting.exception():
            warming.cancel()
            await asyncio.wait((warming,))
        if starting.cancelled():
            return
        handle = starting.result()
        dying = asyncio.create_task(handle.wait_died())
        dying.add_done_callback(lambda _: stop.ask())
        try:
            await warming
            tell = None if ready is None else partial(_tell, ready, handle.info)
            await serve_until_stopped(handle, tokenizers, engine.services, options, stop, tell, workers)
            if dying.done():
                raise EngineDied(f"{dying.result()}, so the server ended too")
        finally:
            dying.cancel()
            await handle.close()


def _tell(ready: Callable[[str, EngineInfo], None], info: EngineInfo, url: str) -> None:
    ready(url, info)
