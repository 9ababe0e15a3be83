"""Starts, watches and kills the engine processes of a host. Imports neither torch nor numpy."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from shoal.core import ShoalError
from shoal.engine.process import lifeline
from shoal.engine.process.child_process import EngineChild, PrestartedEngine

_SETTLE_S = 0.01


class EngineMessage(msgspec.Struct, tag="EngineSaid", frozen=True):
    """A message of an engine."""

    engine: str
    incarnation: int
    pid: int
    message: lifeline.FromEngine


class EngineExited(msgspec.Struct, tag=True, frozen=True):
    """An engine's process did not start or is gone, or its whole node."""

    engine: str
    incarnation: int
    reason: str
    """The error that it sent, its exit status or signal, in words."""
    failure: str | None = None
    """Class name of the error that it sent, as in ``lifeline.Failed``."""
    suspects: tuple[str, ...] = ()
    """Wire ids of the requests in the steps that it was computing."""


NodeEvent = EngineMessage | EngineExited


class RunningEngine(msgspec.Struct, frozen=True):
    """A running engine of a node."""

    engine: str
    incarnation: int
    pid: int
    ready: lifeline.Ready | None
    """None: it still loads."""


class EngineUsage(msgspec.Struct, frozen=True):
    """Resources that an engine's process has used since its start."""

    engine: str
    incarnation: int
    cpu_s: float
    """CPU time, including ended children, and while it loads also running ones."""
    read_bytes: int
    """Bytes read from disks; 0 where unknown."""


@dataclass(slots=True)
class _Owned:
    """A started engine that has not ended."""

    incarnation: int
    killed: bool = False
    """Whether to kill it as soon as its process exists."""
    child: EngineChild | None = None
    process: psutil.Process | None = None
    """``child``, for its resource usage."""
    ready: lifeline.Ready | None = None


class Node:
    """Starts engine processes, reads their messages, and kills them; they end with this process.

    folder: a private folder for sockets and journals. on_event: called from the event loop. host: address at
    which other hosts reach the engines; None: they listen on sockets in the folder. prestarted: a process for
    the first engine.
    """

    def __init__(
        self,
        folder: Path,
        on_event: Callable[[NodeEvent], None],
        host: str | None = None,
        prestarted: PrestartedEngine | None = None,
    ) -> None:
        self._prestarted = prestarted
        self._folder = folder
        self._on_event = on_event
        self._host = host
        self._owned: dict[str, _Owned] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = 0

    def start(self, engine: str, incarnation: int, config: bytes) -> None:
        """Start a process with a pickled ``EngineConfig``; ``EngineExited`` follows if that fails."""
        if engine in self._owned:
            running = self._owned[engine].incarnation
            self._on_event(EngineExited(engine, incarnation, f"its start {running} still runs"))
            return
        owned = self._owned[engine] = _Owned(incarnation)
        task = asyncio.create_task(self._run(engine, owned, config), name=f"own-{engine}-{incarnation}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self, engine: str, incarnation: int) -> None:
        """Kill a process; ``EngineExited`` follows. Unknown ones are ignored."""
        owned = self._owned.get(engine)
        if owned is None or owned.incarnation != incarnation:
            return
        owned.killed = True
        if owned.child is not None:
            owned.child.kill()

    @property
    def owns_any(self) -> bool:
        """Whether there are engines, including starting ones."""
        return bool(self._owned)

    async def wait_started(self) -> None:
        """Wait until every engine has a process, or has ended."""
        while any(owned.child is None for owned in self._owned.values()):
            await asyncio.sleep(_SETTLE_S)

    def running(self) -> list[RunningEngine]:
        return [
            RunningEngine(engine, owned.incarnation, owned.child.pid, owned.ready)
            for engine, owned in self._owned.items()
            if owned.child is not None
        ]

    def usages(self) -> list[EngineUsage]:
        """Resource usage of all engines, also of hung ones."""
        return [
            EngineUsage(engine, owned.incarnation, *used)
            for engine, owned in self._owned.items()
            if owned.process is not None
            and (used := _measure_usage(owned.process, children=owned.ready is None)) is not None
        ]

    async def close(self) -> None:
        """End all engines, by force if needed, and wait until they are gone."""
        for owned in self._owned.values():
            owned.killed = True
        if self._prestarted is not None:
            await self._prestarted.stop()
        children = [owned.child for owned in self._owned.values() if owned.child is not None]
        await asyncio.gather(*(child.stop() for child in children))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, engine: str, owned: _Owned, config: bytes) -> None:
        """Run an engine from its start to its end."""
        self._starts += 1
        socket = self._folder / str(self._starts)
        bind = f"ipc://{socket}" if self._host is None else f"tcp://{self._host}:*"

        def on_message(pid: int, message: lifeline.FromEngine) -> None:
            if isinstance(message, lifeline.Ready):
                owned.ready = message
            self._on_event(EngineMessage(engine, owned.incarnation, pid, message))

        prestarted, self._prestarted = self._prestarted, None
        try:
            child = await EngineChild.start(
                config, bind, socket.with_suffix(".journal"), on_message, prestarted
            )
        except (OSError, ShoalError) as error:
            self._end(engine, owned, lifeline.describe_failure(error))
            return
        owned.child = child
        with suppress(psutil.Error):  # it has ended already
            owned.process = psutil.Process(child.pid)
        if owned.killed:
            child.kill()
        end = await child.wait()
        for used in (socket, socket.with_name(socket.name + lifeline.TRANSFER_SUFFIX)):
            used.unlink(missing_ok=True)
        self._end(engine, owned, end.failure, end.status, end.suspects)

    def _end(
        self,
        engine: str,
        owned: _Owned,
        failure: lifeline.Failed | None,
        status: str = "",
        suspects: tuple[str, ...] = (),
    ) -> None:
        del self._owned[engine]
        if failure is None:
            event = EngineExited(engine, owned.incarnation, status, None, suspects)
        else:
            event = EngineExited(engine, owned.incarnation, failure.message, failure.kind, suspects)
        self._on_event(event)


def _measure_usage(process: psutil.Process, *, children: bool) -> tuple[float, int] | None:
    """CPU time and bytes read; None: unknown, or the process has ended.

    children: whether to count running children and theirs, such as one that stores weights.
    """
    try:
        cpu_s = sum(process.cpu_times()[:4])  # user, system, and both of ended children
        running = process.children(recursive=True) if children else []
    except psutil.Error:
        return None
    read_bytes = _read_bytes(process)
    for child in running:
        with suppress(psutil.Error):  # it has ended
            cpu_s += sum(child.cpu_times()[:4])
            read_bytes += _read_bytes(child)
    return cpu_s, read_bytes


def _read_bytes(process: psutil.Process) -> int:
    try:
        return int(process.io_counters().read_bytes)
    except (psutil.Error, AttributeError):  # not permitted, or not supported
        return 0
