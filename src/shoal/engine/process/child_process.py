"""EngineChild: starts, watches and ends an engine process, on the owner's side; imports no torch or numpy."""

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
from shoal.engine.process.crash_journal import create_journal, read_journal

BUILDER = "shoal.engine.process.torch_engine:build_engine"
"""Default of ``EngineConfig.builder``."""

SIMULATED_BUILDER = "shoal.engine.simulated.build:build_engine"
"""Builds engines with a simulated device."""

# Needed by the engine, and by its owner.
_MIN_OPEN_FILES = 64
_EXIT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


def check_open_files() -> None:
    """Raise ConfigError if the limit of open files is too low: some libraries hang or abort at the limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < _MIN_OPEN_FILES:
        raise ConfigError(
            f"only {allowed} files may be open at once, and an engine needs {_MIN_OPEN_FILES}: "
            "allow more, as with `ulimit -n 1024`"
        )


def describe_end(code: int | None) -> str:
    """How a process ended, for error messages; code: its exit status, or minus the signal number."""
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
    """Exit status or signal, in words."""
    failure: lifeline.Failed | None
    """The error that it reported, if any."""
    suspects: tuple[str, ...]
    """Ids of the requests in its plans in flight."""


@dataclass(frozen=True, slots=True)
class PrestartedEngine:
    """A started engine process that has not received its configuration yet."""

    process: asyncio.subprocess.Process
    end: socket.socket
    """The owner's end of its lifeline."""

    @classmethod
    async def start(cls, builder: str | None = None) -> Self:
        """Start a process, which imports the module of ``builder`` right away.

        Raises ConfigError if too few files may be open, OSError if the process cannot be started.
        """
        check_open_files()
        end, child_end = socket.socketpair()
        end.setblocking(False)
        try:
            with interrupts_held_back():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "shoal.engine",
                    *([] if builder is None else [builder.partition(":")[0]]),
                    stdin=child_end.fileno(),
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
        except BaseException:
            end.close()
            raise
        finally:
            child_end.close()
        return cls(process, end)

    async def stop(self) -> None:
        """Kill the process, and wait for its end."""
        self.end.close()
        kill_child(self.process)
        await self.process.wait()


class EngineChild:
    """A running engine process, its lifeline and its journal."""

    def __init__(
        self,
        prestarted: PrestartedEngine,
        start: lifeline.Start,
        on_message: Callable[[int, lifeline.FromEngine], None],
    ) -> None:
        process, end = self._process, self._end = prestarted.process, prestarted.end
        self._journal = Path(start.journal)
        self._on_message = on_message
        self._frames = lifeline.Frames()
        self._failure: lifeline.Failed | None = None
        asyncio.get_running_loop().add_reader(end, self._read)
        self._starting = asyncio.create_task(self._send_start(start), name=f"engine-start-{process.pid}")
        self._ending = asyncio.create_task(self._wait(), name=f"engine-{process.pid}")

    @classmethod
    async def start(
        cls,
        config: bytes,
        bind: str,
        journal: Path,
        on_message: Callable[[int, lifeline.FromEngine], None],
        prestarted: PrestartedEngine | None = None,
    ) -> "EngineChild":
        """Start a process.

        config: a pickled ``EngineConfig``. bind: the address where it will listen. journal: path of the crash
        journal, created now and removed at the end. on_message: called with the process id and each message
        of the engine. prestarted: a process to use, unless it has ended.

        Raises ConfigError if too few files may be open, OSError if the process cannot be started.
        """
        if prestarted is not None and prestarted.process.returncode is not None:
            await prestarted.stop()
            prestarted = None
        prestarted = prestarted or await PrestartedEngine.start()
        try:
            create_journal(journal)
        except BaseException:
            await prestarted.stop()
            raise
        return cls(prestarted, lifeline.Start(config, bind, str(journal)), on_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> ChildEnd:
        """Wait for the end of the process; all of its messages are delivered before."""
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""
        kill_child(self._process)

    async def stop(self) -> ChildEnd:
        """End the process, by a kill if it does not end in time, and wait for that."""
        self._close_lifeline()
        try:
            return await asyncio.wait_for(self.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            return await self.wait()

    async def _send_start(self, start: lifeline.Start) -> None:
        with contextlib.suppress(ConnectionError):  # the process has ended; see ``wait``
            await asyncio.get_running_loop().sock_sendall(self._end, lifeline.pack(start))

    async def _wait(self) -> ChildEnd:
        code = await self._process.wait()
        self._read()
        self._close_lifeline()
        suspects = read_journal(self._journal)
        self._journal.unlink(missing_ok=True)
        return ChildEnd(status=describe_end(code), failure=self._failure, suspects=suspects)

    def _read(self) -> None:
        """Deliver messages of the engine."""
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
        """Close this end, which also ends the process; closing twice does nothing."""
        if self._end.fileno() >= 0:
            self._starting.cancel()
            asyncio.get_running_loop().remove_reader(self._end)
            asyncio.get_running_loop().remove_writer(self._end)
            self._end.close()
