"""Who owns the engine processes of a host. Importing this module needs neither torch nor numpy."""

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


class EngineSaid(msgspec.Struct, tag=True, frozen=True):
    """An engine told something."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    pid: int
    """Its process."""
    message: lifeline.FromEngine
    """What it told."""


class EngineExited(msgspec.Struct, tag=True, frozen=True):
    """An engine's process is gone, or was never there; as in ``backend.Exited``."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    reason: str
    """Why, in words."""
    failure: str | None = None
    """Name of the class of the error that it told of."""
    suspects: tuple[str, ...] = ()
    """Ids of the requests whose plans were being computed."""


NodeEvent = EngineSaid | EngineExited


class RunningEngine(msgspec.Struct, frozen=True):
    """An engine of a node."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    pid: int
    """Its process."""
    ready: lifeline.Ready | None
    """What it told when it had loaded; None: it still loads."""


class EngineUsage(msgspec.Struct, frozen=True):
    """What an engine's process has used since its start."""

    engine: str
    """Its name."""
    incarnation: int
    """Which start of it."""
    cpu_s: float
    """CPU time, with that of its children that have ended."""
    read_bytes: int
    """What was read from disks, where that is known."""


@dataclass(slots=True)
class _Owned:
    """An engine that was started and is not gone."""

    incarnation: int
    killed: bool = False
    """It is to be killed as soon as it is there."""
    child: EngineChild | None = None
    process: psutil.Process | None = None
    """The same, to look at from outside."""
    ready: lifeline.Ready | None = None


class Node:
    """Starts engine processes, hears them, and kills them; they end with the process that has it.

    folder: a private folder for sockets and journals. on_event: called from the event loop. host: address at
    which engines can be reached from other hosts; None: they listen on sockets in the folder. bare: a process
    for the engine that is started first.
    """

    def __init__(
        self,
        folder: Path,
        on_event: Callable[[NodeEvent], None],
        host: str | None = None,
        bare: PrestartedEngine | None = None,
    ) -> None:
        self._bare = bare
        self._folder = folder
        self._on_event = on_event
        self._host = host
        self._owned: dict[str, _Owned] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = 0

    def start(self, engine: str, incarnation: int, config: bytes) -> None:
        """Start a process with a pickled ``EngineConfig``; ``EngineExited`` tells if that fails."""
        if engine in self._owned:
            running = self._owned[engine].incarnation
            self._on_event(EngineExited(engine, incarnation, f"its start {running} still runs"))
            return
        owned = self._owned[engine] = _Owned(incarnation)
        task = asyncio.create_task(self._run(engine, owned, config), name=f"own-{engine}-{incarnation}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self, engine: str, incarnation: int) -> None:
        """Kill a process; ``EngineExited`` tells when it is gone. Unknown ones are ignored."""
        owned = self._owned.get(engine)
        if owned is None or owned.incarnation != incarnation:
            return
        owned.killed = True
        if owned.child is not None:
            owned.child.kill()

    @property
    def owns_any(self) -> bool:
        """Whether there are engines, also such as are about to start."""
        return bool(self._owned)

    async def settle(self) -> None:
        """Wait until every engine that was started has a process, or is gone."""
        while any(owned.child is None for owned in self._owned.values()):
            await asyncio.sleep(_SETTLE_S)

    def running(self) -> list[RunningEngine]:
        """The engines whose processes run."""
        return [
            RunningEngine(engine, owned.incarnation, owned.child.pid, owned.ready)
            for engine, owned in self._owned.items()
            if owned.child is not None
        ]

    def usages(self) -> list[EngineUsage]:
        """What the engines use, also those that cannot tell anything themselves."""
        return [
            EngineUsage(engine, owned.incarnation, *used)
            for engine, owned in self._owned.items()
            if owned.process is not None and (used := _used(owned.process)) is not None
        ]

    async def close(self) -> None:
        """End all engines, which are killed if they do not end, and wait until they are gone."""
        for owned in self._owned.values():
            owned.killed = True
        if self._bare is not None:
            await self._bare.stop()
        children = [owned.child for owned in self._owned.values() if owned.child is not None]
        await asyncio.gather(*(child.stop() for child in children))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, engine: str, owned: _Owned, config: bytes) -> None:
        """An engine's life."""
        self._starts += 1
        socket = self._folder / str(self._starts)
        bind = f"ipc://{socket}" if self._host is None else f"tcp://{self._host}:*"

        def hear(pid: int, message: lifeline.FromEngine) -> None:
            if isinstance(message, lifeline.Ready):
                owned.ready = message
            self._on_event(EngineSaid(engine, owned.incarnation, pid, message))

        bare, self._bare = self._bare, None
        try:
            child = await EngineChild.start(config, bind, socket.with_suffix(".journal"), hear, bare)
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


def _used(process: psutil.Process) -> tuple[float, int] | None:
    """CPU time and bytes read; None: it cannot be known, or the process has ended."""
    try:
        cpu_s = sum(process.cpu_times()[:4])  # of the system and children, too
    except psutil.Error:
        return None
    try:
        return cpu_s, process.io_counters().read_bytes
    except (psutil.Error, AttributeError):  # not allowed, or not known on this system
        return cpu_s, 0
