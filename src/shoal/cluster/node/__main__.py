"""``python -m shoal.cluster.node [FOLDER]``: a node, in a folder that no other node has.

Its standard input is a pipe from the process that starts it: until a server uses the node, its end is the end
of the node. Later the node outlives that process by as long as the server told it to. Without FOLDER its path
is read from there, up to a zero byte, and may come later: meanwhile an engine gets ready. SIGINT and SIGHUP,
which a terminal sends, are ignored; SIGTERM ends a node that no server uses.
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
"""Exit status where another node has the folder."""

_LONGEST_WAIT_S = 20.0
"""A node is told its folder within this time, or ends: who started it does something that takes longer."""


async def _serve(folder: NodeFolder, starter: asyncio.StreamReader, bare: PrestartedEngine | None) -> None:
    server = NodeServer(folder, bare)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.tenancy.end_unused)

    async def watch_starter() -> None:
        while await starter.read(1):
            pass
        server.tenancy.end_unclaimed()

    watching = asyncio.create_task(watch_starter())
    await server.run()
    watching.cancel()


async def _folder_to_come(starter: asyncio.StreamReader) -> Path | None:
    """The folder that whoever started this process tells of; None: there is no use for it."""
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_LONGEST_WAIT_S):
            path = await starter.readuntil(END_OF_FOLDER)
            return Path(os.fsdecode(path.removesuffix(END_OF_FOLDER)))
    return None


async def _run(path: Path | None) -> int:
    starter = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(starter), sys.stdin)
    bare = None
    if path is None:
        with suppress(OSError, ConfigError):  # the engine that is started then tells of it
            bare = await PrestartedEngine.start(BUILDER)
        path = await _folder_to_come(starter)
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
            await _serve(folder, starter, bare)
            return 0
    if bare is not None:
        await bare.stop()
    return status


def main(arguments: list[str]) -> int:
    """Run a node until it is over; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return asyncio.run(_run(Path(arguments[0]) if arguments else None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
