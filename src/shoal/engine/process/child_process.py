"""An engine process, for the process that owns it. Importing this module needs neither torch nor numpy."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shoal.core import ConfigError
from shoal.engine.process import lifeline
from shoal.engine.process.child_signals import interrupts_held_back, kill_child
from shoal.engine.process.crash_journal import make_journal, read_journal

BUILDER = "shoal.engine.process.torch_engine:build_engine"
"""What builds engines, as ``EngineConfig.builder`` has it."""

# Needed by the engine, and by the process that starts it before it has a client.
_MIN_OPEN_FILES = 64
_EXIT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


def check_open_files() -> None:
    """Raise ConfigError if too few files may be open: some libraries hang or abort when they run out."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < _MIN_OPEN_FILES:
        raise ConfigError(
            f"only {allowed} files may be open at once, and an engine needs {_MIN_OPEN_FILES}: "
            "allow more, as with `ulimit -n 1024`"
        )


def describe_end(code: int | None) -> str:
    """How a process ended, by its exit status or minus the signal's number, for an error message."""
    if code is None:
        return "it still runs"
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"killed by signal {-code}{known.get(-code, '')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """How an engine process ended."""

    status: str
    """In words: its exit status, or the signal."""
    failure: lifeline.Failed | None
    """The error that it told of."""
    suspects: tuple[str, ...]
    """Ids of the requests whose plans were being computed."""


@dataclass(frozen=True, slots=True)
class PrestartedEngine:
    """An engine process that is yet to be told what it is."""

    process: asyncio.subprocess.Process
    """It."""
    end: socket.socket
    """Our end of its lifeline."""

    @classmethod
    async def start(cls, builder: str | None = None) -> Self:
        """Start a process; it first imports what ``builder`` needs.

        Raises ConfigError if too few files may be open, OSError if the process cannot be started.
        """
        check_open_files()
        end, its_end = socket.socketpair()
        end.setblocking(False)
        try:
            with interrupts_held_back():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "shoal.engine",
                    *([] if builder is None else [builder.partition(":")[0]]),
                    stdin=its_end.fileno(),
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
        except BaseException:
            end.close()
            raise
        finally:
            its_end.close()
        return cls(process, end)

    async def stop(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.end.close()
        kill_child(self.process)
        await self.process.wait()


class EngineChild:
    """A running engine process, its lifeline and its journal."""

    def __init__(
        self,
        bare: PrestartedEngine,
        start: lifeline.Start,
        on_message: Callable[[int, lifeline.FromEngine], None],
    ) -> None:
        process, end = self._process, self._end = bare.process, bare.end
        self._journal = Path(start.journal)
        self._on_message = on_message
        self._frames = lifeline.Frames()
        self._failure: lifeline.Failed | None = None
        asyncio.get_running_loop().add_reader(end, self._read)
        self._starting = asyncio.create_task(self._tell_start(start), name=f"engine-start-{process.pid}")
        self._ending = asyncio.create_task(self._wait(), name=f"engine-{process.pid}")

    @classmethod
    async def start(
        cls,
        config: bytes,
        bind: str,
        journal: Path,
        on_message: Callable[[int, lifeline.FromEngine], None],
        bare: PrestartedEngine | None = None,
    ) -> "EngineChild":
        """Start a process.

        config: a pickled ``EngineConfig``. bind: address where it will listen. journal: path of a file that
        is made now and removed in the end. on_message: called with the process id for what the engine tells.
        bare: a process to be used, unless it is gone.

        Raises ConfigError if too few files may be open, OSError if the process cannot be started.
        """
        if bare is not None and bare.process.returncode is not None:
            await bare.stop()
            bare = None
        bare = bare or await PrestartedEngine.start()
        try:
            make_journal(journal)
        except BaseException:
            await bare.stop()
            raise
        return cls(bare, lifeline.Start(config, bind, str(journal)), on_message)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait(self) -> ChildEnd:
        """Wait until the process is gone, and all that it has told was handed on."""
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """Kill the process; ``wait`` tells when it is gone."""
        kill_child(self._process)

    async def stop(self) -> ChildEnd:
        """End the process, kill it if it does not end, and wait until it is gone."""
        self._close_lifeline()
        try:
            return await asyncio.wait_for(self.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            return await self.wait()

    async def _tell_start(self, start: lifeline.Start) -> None:
        with contextlib.suppress(ConnectionError):  # ``wait`` then says how it ended
            await asyncio.get_running_loop().sock_sendall(self._end, lifeline.pack(start))

    async def _wait(self) -> ChildEnd:
        code = await self._process.wait()
        self._read()
        self._close_lifeline()
        suspects = read_journal(self._journal)
        self._journal.unlink(missing_ok=True)
        return ChildEnd(status=describe_end(code), failure=self._failure, suspects=suspects)

    def _read(self) -> None:
        """Hand on what the engine has told."""
        while self._end.fileno() >= 0:
            try:
                data = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._close_lifeline()
                return
            for payload in self._frames.feed(data):
                message = lifeline.decode_from_engine(payload)
                if isinstance(message, lifeline.Failed):
                    self._failure = message
                else:
                    self._on_message(self.pid, message)

    def _close_lifeline(self) -> None:
        """Close our end, which also ends the process; closing twice does nothing."""
        if self._end.fileno() >= 0:
            self._starting.cancel()
            asyncio.get_running_loop().remove_reader(self._end)
            asyncio.get_running_loop().remove_writer(self._end)
            self._end.close()
