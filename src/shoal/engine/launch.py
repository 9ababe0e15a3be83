"""One engine process and the connection to it, for a client that owns it."""

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.core import EngineDied
from shoal.engine import lifeline, wire
from shoal.engine.channel import EngineChannel
from shoal.engine.child import EngineChild
from shoal.engine.config import EngineConfig
from shoal.engine.info import EngineInfo
from shoal.engine.options import EngineOptions
from shoal.engine.private_folder import PrivateFolder

_SOCKET_NAME = "engine"
_HEARTBEAT_S = 1.0
_EXIT_TIMEOUT_S = 5.0


class EngineProcess:
    """A running engine process and its socket; it does not interpret messages."""

    def __init__(self, folder: PrivateFolder, on_heartbeat: Callable[[], None]) -> None:
        self._folder = folder
        self._on_heartbeat = on_heartbeat
        self._child: EngineChild
        self._channel: EngineChannel | None = None
        self._told: deque[lifeline.FromEngine | wire.FromEngine] = deque()
        self._news = asyncio.Event()
        self._ending: asyncio.Future[None]
        self._end = "it still runs"

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        folders: Mapping[str, Path],
        builder: str,
        on_heartbeat: Callable[[], None] = lambda: None,
    ) -> "EngineProcess":
        """Start the process, to which ``wait_ready`` connects.

        Raises ConfigError if too few files may be open.
        """
        folder = PrivateFolder(_SOCKET_NAME)
        process = cls(folder, on_heartbeat)
        config = EngineConfig(
            options=options, folders=dict(folders), builder=builder, heartbeat_s=_HEARTBEAT_S
        )
        bind = f"ipc://{folder.path / _SOCKET_NAME}"
        try:
            process._child = await EngineChild.start(
                pickle.dumps(config), bind, folder.path / "journal", process._hear
            )
        except BaseException:
            folder.remove()
            raise
        process._ending = asyncio.ensure_future(process._watch())
        return process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    async def wait_ready(self, progress: Callable[[str], None] | None) -> EngineInfo:
        """Wait until the engine is loaded; raises the error that ended it, if one did."""
        while True:
            match await self._next():
                case lifeline.Ready() as ready:
                    self._channel = EngineChannel(ready.endpoint, "handle", self._tell)
                    return ready.info
                case lifeline.Loading() as loading:
                    if progress is not None:
                        progress(loading.what)
                case lifeline.Failed() as failed:
                    raise lifeline.failure_to_error(failed, "loading")
                case None:
                    raise EngineDied(f"the engine process ended while loading ({self.describe_end()})")

    async def receive(self) -> lifeline.FromEngine | wire.FromEngine | None:
        """The next message; None if the process has ended and nothing is left to read."""
        return await self._next()

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without waiting; does nothing once the process has ended."""
        if self._channel is not None:
            self._channel.send(message)

    def describe_end(self) -> str:
        """How the process ended, for an error message."""
        return self._end

    async def stop(self) -> None:
        """Ask the process to end, kill it if it does not, and release the socket."""
        try:
            self.send(wire.Shutdown())
            await asyncio.wait((self._ending,), timeout=_EXIT_TIMEOUT_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and release the socket."""
        self._child.kill()
        await self._ending
        if self._channel is not None:
            self._channel.close()
        self._folder.remove()

    async def _next(self) -> lifeline.FromEngine | wire.FromEngine | None:
        while not self._told:
            if self._ending.done():
                return None
            self._news.clear()
            await self._news.wait()
        return self._told.popleft()

    def _hear(self, _: int, message: lifeline.FromEngine) -> None:
        if isinstance(message, lifeline.Beat):
            self._on_heartbeat()
        else:
            self._tell(message)

    def _tell(self, message: lifeline.FromEngine | wire.FromEngine) -> None:
        self._told.append(message)
        self._news.set()

    async def _watch(self) -> None:
        end = await self._child.wait()
        self._end = end.status
        if end.failure is not None:
            self._told.append(end.failure)
        asyncio.get_running_loop().call_soon(self._news.set)
