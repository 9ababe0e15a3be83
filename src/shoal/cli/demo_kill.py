"""Kills an engine amid the demo's burst."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from shoal.cli.admin_client import AdminClient
from shoal.core import EngineDied

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """An engine that was killed."""

    engine: str
    """Its name."""
    pid: int
    """Its process."""
    requests: int
    """Those that it had not finished."""


async def kill_amid(url: str, is_amid: Callable[[], bool]) -> Kill:
    """Wait until ``is_amid``, and kill the engine of the server at ``url`` that has the most requests.

    Raises EngineDied if none of them has any.
    """
    while not is_amid():
        await asyncio.sleep(_POLL_S)
    client = AdminClient(url, os.environ.get("SHOAL_ADMIN_KEY"))
    answer = await asyncio.to_thread(client.list, "engines")
    engine = max(answer["data"], key=lambda engine: engine["requests"])
    if engine["pid"] is None or not engine["requests"]:
        raise EngineDied("no engine has a request that it could lose")
    os.kill(engine["pid"], signal.SIGKILL)
    return Kill(engine["name"], engine["pid"], engine["requests"])
