"""Starting an engine process and connecting to it."""

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from shoal.core import ConfigError, EngineDied
from shoal.engine import wire
from shoal.engine.children import interrupts_held_back
from shoal.engine.info import EngineInfo
from shoal.engine.options import EngineOptions
from shoal.engine.private_folder import PrivateFolder
from shoal.engine.process import ProcessConfig

_SOCKET_NAME = "engine"
# Needed by the engine, and by the process that starts it before it has a client.
_MIN_OPEN_FILES = 64
_EXIT_TIMEOUT_S = 5.0
# How long to wait for the last message of a process that has ended.
_LAST_MESSAGE_TIMEOUT_S = 0.1
# More heartbeats than a process sends before they are read.
_MAX_HEARTBEATS = 4096
_READABLE = int(zmq.POLLIN)


def check_open_files() -> None:
    """Raise ConfigError if too few files may be open: some libraries hang or abort when they run out."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < _MIN_OPEN_FILES:
        raise ConfigError(
            f"only {allowed} files may be open at once, and an engine needs {_MIN_OPEN_FILES}: "
            "allow more, as with `ulimit -n 1024`"
        )


class _Channel:
    """One end of a pair of sockets that only this user can reach.

    The socket is watched here, and not by ``zmq.asyncio``, whose futures take as much time for one message as
    everything else that is done for a token.
    """

    def __init__(self) -> None:
        self._folder = PrivateFolder(_SOCKET_NAME)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self.endpoint = f"ipc://{self._folder.path / _SOCKET_NAME}"
        self._socket.bind(self.endpoint)
        self.frames: deque[bytes] = deque()
        """What has come and was not read."""
        self.news = asyncio.Event()
        """Set when frames come."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        """Take all frames: the descriptor tells of one only until somebody looks."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self.frames.append(self._socket.recv(zmq.NOBLOCK))
            self.news.set()

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting; it is lost if nobody is there any more."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        self._receive()  # sending looks, too

    def forget_path(self) -> None:
        """Remove the socket's folder, which an established connection does not need."""
        self._folder.remove()

    def close(self) -> None:
        """Release the socket, and drop what was not sent."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()
        self.forget_path()


class EngineProcess:
    """A running engine process and its socket; it does not interpret messages.

    lifeline: our end of the process's standard input, over which it sends heartbeats. on_heartbeat: called
    for them.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: _Channel,
        lifeline: socket.socket,
        on_heartbeat: Callable[[], None],
    ) -> None:
        self._process = process
        self._channel = channel
        self._lifeline = lifeline
        self._on_heartbeat = on_heartbeat
        self._ending = asyncio.ensure_future(process.wait())
        self._ending.add_done_callback(lambda _: channel.news.set())
        asyncio.get_running_loop().add_reader(lifeline, self._read_heartbeats)

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        folders: Mapping[str, Path],
        builder: str,
        on_heartbeat: Callable[[], None] = lambda: None,
    ) -> "EngineProcess":
        """Start the process, which then sends Loading messages and at last Ready or Failed.

        Raises ConfigError if too few files may be open.
        """
        check_open_files()
        channel = _Channel()
        lifeline, its_end = socket.socketpair()
        lifeline.setblocking(False)
        try:
            config = ProcessConfig(
                endpoint=channel.endpoint, options=options, folders=dict(folders), builder=builder
            )
            with interrupts_held_back():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "shoal.engine",
                    stdin=its_end.fileno(),
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            its_end.close()
            with contextlib.suppress(ConnectionError):  # ``receive`` then says how it ended
                await asyncio.get_running_loop().sock_sendall(lifeline, pickle.dumps(config))
        except BaseException:
            channel.close()
            lifeline.close()
            its_end.close()
            raise
        return cls(process, channel, lifeline, on_heartbeat)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait_ready(self, progress: Callable[[str], None] | None) -> EngineInfo:
        """Wait until the engine is loaded; raises the error that ended it, if one did."""
        while True:
            match await self.receive():
                case wire.Ready() as ready:
                    self._channel.forget_path()
                    return ready.info
                case wire.Loading() as loading:
                    if progress is not None:
                        progress(loading.what)
                case wire.Failed() as failed:
                    raise wire.failure_to_error(failed, "loading")
                case None:
                    raise EngineDied(f"the engine process ended while loading ({self.describe_end()})")

    def _read_heartbeats(self) -> None:
        try:
            heartbeats = self._lifeline.recv(_MAX_HEARTBEATS)
        except BlockingIOError:
            return
        except ConnectionError:
            heartbeats = b""
        if heartbeats:
            self._on_heartbeat()
        else:
            asyncio.get_running_loop().remove_reader(self._lifeline)

    async def receive(self) -> wire.FromEngine | None:
        """The next message; None if the process has ended and nothing is left to read."""
        frames, news = self._channel.frames, self._channel.news
        while not frames:
            news.clear()
            if not self._ending.done():
                await news.wait()
                continue
            try:
                await asyncio.wait_for(news.wait(), _LAST_MESSAGE_TIMEOUT_S)
            except TimeoutError:
                return None
        return wire.decode_from_engine(frames.popleft())

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without waiting; does nothing once the process has ended."""
        if self._process.returncode is None:
            self._channel.send(wire.encode(message))

    def describe_end(self) -> str:
        """How the process ended, for an error message."""
        code = self._process.returncode
        if code is None:
            return "it still runs"
        if code >= 0:
            return f"exit code {code}"
        known = {number.value: f" ({number.name})" for number in signal.Signals}
        return f"killed by signal {-code}{known.get(-code, '')}"

    async def stop(self) -> None:
        """Ask the process to end, kill it if it does not, and release the socket."""
        try:
            self.send(wire.Shutdown())
            await asyncio.wait((self._ending,), timeout=_EXIT_TIMEOUT_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and release the socket."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._ending
        asyncio.get_running_loop().remove_reader(self._lifeline)
        self._lifeline.close()
        self._channel.close()
