"""``python -m shoal.cluster.node FOLDER``: a node, in a folder that no other node has.

Its standard input is a pipe from the process that starts it: until a server uses the node, its end is the end
of the node. Later the node outlives that process by as long as the server told it to. SIGINT and SIGHUP,
which a terminal sends, are ignored; SIGTERM ends a node that no server uses.
"""

import asyncio
import signal
import sys
from pathlib import Path

from shoal.cluster.node.folder import NodeFolder
from shoal.cluster.node.server import NodeServer
from shoal.core import ConfigError

TAKEN = 3
"""Exit status where another node has the folder."""


async def _serve(folder: NodeFolder) -> None:
    server = NodeServer(folder)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.tenancy.end_unused)
    starter = sys.stdin.fileno()

    def starter_gone() -> None:
        loop.remove_reader(starter)
        server.tenancy.end_unclaimed()

    loop.add_reader(starter, starter_gone)
    await server.run()


def main(path: Path) -> int:
    """Run a node until it is over; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        folder = NodeFolder(path)
    except BlockingIOError:
        return TAKEN
    except (OSError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    asyncio.run(_serve(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
