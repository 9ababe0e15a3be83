"""Entry point of a node: ``python -m shoal.cluster.node [FOLDER]``, with a folder of its own.

Standard input is a pipe from the parent process. Until a server has attached, the end of that pipe ends the
node; later the node outlives the parent by the orphan time of the server. Without FOLDER, the path is read
from standard input, up to a zero byte, while a first engine is prestarted. SIGINT and SIGHUP, which a
terminal sends, are ignored; SIGTERM ends a node without a server.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from shoal.cluster.backends.node_start import END_OF_FOLDER
from shoal.cluster.node.folder import NodeFolder
from shoal.cluster.node.server import NodeServer
from shoal.core import ConfigError
from shoal.engine.process.child_process import BUILDER, PrestartedEngine

TAKEN = 3
"""Exit status if another node has the folder."""

_FOLDER_TIMEOUT_S = 20.0
"""A node that has not got its folder after this time ends."""


async def _serve(
    folder: NodeFolder, parent: asyncio.StreamReader, prestarted: PrestartedEngine | None
) -> None:
    server = NodeServer(folder, prestarted)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.attachment.end_if_detached)

    async def watch_parent() -> None:
        while await parent.read(1):
            pass
        server.attachment.end_if_never_used()

    watching = asyncio.create_task(watch_parent())
    await server.run()
    watching.cancel()


async def _read_folder(parent: asyncio.StreamReader) -> Path | None:
    """The folder from standard input; None: the pipe ended, or it took too long."""
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_FOLDER_TIMEOUT_S):
            path = await parent.readuntil(END_OF_FOLDER)
            return Path(os.fsdecode(path.removesuffix(END_OF_FOLDER)))
    return None


async def _run(path: Path | None) -> int:
    parent = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    prestarted = None
    if path is None:
        with suppress(OSError, ConfigError):  # the start of the engine reports it
            prestarted = await PrestartedEngine.start(BUILDER)
        path = await _read_folder(parent)
    status = 0
    if path is not None:
        try:
            folder = NodeFolder(path)
        except BlockingIOError:
            status = TAKEN
        except (OSError, ConfigError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        else:
            await _serve(folder, parent, prestarted)
            return 0
    if prestarted is not None:
        await prestarted.stop()
    return status


def main(arguments: list[str]) -> int:
    """Run a node until it ends; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return asyncio.run(_run(Path(arguments[0]) if arguments else None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
