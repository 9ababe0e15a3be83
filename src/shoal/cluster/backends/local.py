"""The local backend: engines as child processes of a node process on this machine."""

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from shoal.cluster.backends.interface import BackendEvent, EngineConfig
from shoal.cluster.backends.node_start import drop_early_node, start_node
from shoal.cluster.node import EngineExited, EngineMessage, RunningEngine, wire
from shoal.cluster.node.__main__ import TAKEN
from shoal.cluster.node.folder import SOCKET, check_folder, folder_path
from shoal.cluster.node.node_process import cpu_s, find_node, kill_node
from shoal.core import ConfigError, EngineDied
from shoal.engine.process import lifeline
from shoal.engine.process.child_process import check_open_files, describe_end
from shoal.engine.process.stall_tracker import BUSY_LOOP_FACTOR, StallTracker

_log = logging.getLogger(__name__)
_RETRY_S = 0.02
_START_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 10.0
_LOOKS = 10
_END_TIMEOUT_S = 20.0


class _Link:
    """A connection to a node that has accepted this server."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: wire.Welcome
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.pid = welcome.pid
        self.found = welcome.engines
        """Engines that ran when the connection was made."""

    def send(self, message: wire.ToNode) -> None:
        """Send a message; lost if the node is gone."""
        wire.write(self.writer, message)


class LocalBackend:
    """Runs engines as children of a node process, which survives a crash of this process.

    name: of the node, by which another server finds it; None: a private node, which ends with this process.
    orphan_after_s: how long the node and its engines wait for another server after the end of this process.
    heartbeat_s: interval of the node's heartbeats. silence_s: the node is killed after this time without one.
    """

    def __init__(
        self, name: str | None, orphan_after_s: float, heartbeat_s: float = 1.0, silence_s: float = 5.0
    ) -> None:
        """Raises ConfigError for a name that no folder can have."""
        self._what = "the engines' node" if name is None else f"the node of cluster {name!r}"
        self._path = folder_path(name or f"{os.getpid()}-{secrets.token_hex(4)}")
        self._orphan_after_s = 0.0 if name is None else orphan_after_s
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._settings: dict[str, str] = {}
        self._on_event: Callable[[BackendEvent], None] = lambda _: None
        self._link: _Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        """The node, if this process started it."""
        self._engines: dict[str, tuple[int, int]] = {}
        """Incarnation and process id (0: unknown) of each engine that has not exited."""
        self._pending: list[wire.StartEngine] = []
        """Engines to start once the node is there."""
        self._restarting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._message_received = False
        self._closing = False

    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[RunningEngine]:
        """See EngineBackend. Also raises ConfigError if another server uses the node or the limit of open
        files is
        too low, and EngineDied if the node cannot be started.
        """
        check_open_files()
        self._on_event, self._settings = on_event, dict(settings)
        try:
            link = await self._connect()
        except BaseException:
            await self._wait_for_exit()
            raise
        drop_early_node()  # not needed if a node was running
        self._use(link)
        return link.found

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        """See EngineBackend; does nothing after ``close``."""
        if self._closing:
            return
        self._engines[engine] = (incarnation, 0)
        message = wire.StartEngine(engine, incarnation, pickle.dumps(config))
        if self._link is not None:
            self._link.send(message)
            return
        self._pending.append(message)
        if self._restarting is None:
            self._restarting = asyncio.create_task(self._restart_node(), name="node-start")

    def kill_engine(self, engine: str, incarnation: int) -> None:
        """See EngineBackend."""
        if self._link is not None:
            self._link.send(wire.KillEngine(engine, incarnation))
            return
        pending = [m for m in self._pending if (m.engine, m.incarnation) == (engine, incarnation)]
        for message in pending:
            self._pending.remove(message)
            self._exited(EngineExited(engine, incarnation, "it was killed before it was started"))

    def stop_engine(self, engine: str, incarnation: int) -> None:
        """See EngineBackend."""
        self.kill_engine(engine, incarnation)

    async def close(self) -> None:
        """See EngineBackend; no further events. Closing twice does nothing."""
        self._closing = True
        self._on_event = lambda _: None
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait((self._restarting,))
        if self._link is not None:
            self._link.send(wire.Shutdown())
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=_END_TIMEOUT_S)
            if self._link is not None:
                _kill(self._link.pid)
            await self._reading
        await self._wait_for_exit()

    # Connecting

    async def _connect(self) -> _Link:
        """Connect to the node, which is started if there is none."""
        work, last_look_s, used_s = StallTracker(), time.monotonic(), 0.0
        while True:
            link = await self._try_connect()
            if link is not None:
                return link
            code = None if self._process is None else self._process.poll()
            if self._process is None or code in (0, TAKEN):
                await self._start_node()
            elif code is not None:
                raise EngineDied(f"{self._what} ended while it started ({describe_end(code)})")
            assert self._process is not None
            before_s, last_look_s = last_look_s, time.monotonic()
            before_used_s, used_s = used_s, max(used_s, cpu_s(self._process.pid))
            work.observe(last_look_s - before_s, used_s - before_used_s)
            if work.still_s > _START_TIMEOUT_S or work.took_s > BUSY_LOOP_FACTOR * _START_TIMEOUT_S:
                raise EngineDied(f"{self._what} does not start in {self._path}")
            await asyncio.sleep(_RETRY_S)

    async def _try_connect(self) -> _Link | None:
        """Connect to a running node; None if there is none, or it hung and was killed. Raises ConfigError if
        it refuses."""
        check_folder(self._path)
        try:
            reader, writer = await asyncio.open_unix_connection(self._path / SOCKET)
        except (FileNotFoundError, ConnectionError):
            return None
        link = None
        try:
            hello = wire.Hello(
                lifeline.PROTOCOL, os.getpid(), self._settings, self._heartbeat_s, self._orphan_after_s
            )
            wire.write(writer, hello)
            answer = await self._read_answer(reader, find_node(writer))
            if isinstance(answer, wire.Refused):
                raise ConfigError(f"{self._what} cannot be used: {answer.why}")
            if isinstance(answer, wire.Welcome):
                link = _Link(reader, writer, answer)
            return link
        finally:
            if link is None:
                writer.close()

    async def _read_answer(
        self, reader: asyncio.StreamReader, node: psutil.Process | None
    ) -> wire.FromNode | None:
        """The first message of a node; None if it hung and was killed.

        Raises EngineDied if it hangs and its process is unknown.
        """
        work, used_s = StallTracker(), 0.0 if node is None else cpu_s(node.pid)
        answering = asyncio.create_task(wire.read_from_node(reader))
        try:
            while work.still_s < _ANSWER_TIMEOUT_S and work.took_s < BUSY_LOOP_FACTOR * _ANSWER_TIMEOUT_S:
                await asyncio.wait((answering,), timeout=_ANSWER_TIMEOUT_S / _LOOKS)
                if answering.done():
                    return answering.result()
                before_s, used_s = used_s, 0.0 if node is None else cpu_s(node.pid)
                work.observe(_ANSWER_TIMEOUT_S / _LOOKS, used_s - before_s)
        finally:
            answering.cancel()
        if node is None:
            raise EngineDied(f"{self._what} gives no answer; end the process that has {self._path}")
        _log.warning(
            "%s (process %d) hangs, and is replaced with its engines: it gave no answer in %.1f s",
            self._what,
            node.pid,
            work.took_s,
        )
        await asyncio.to_thread(kill_node, node)
        return None

    async def _start_node(self) -> None:
        await self._wait_for_exit()
        self._process = start_node(str(self._path))

    async def _wait_for_exit(self) -> int | None:
        """Wait for the end of the node, if this process started it; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()
        while process.poll() is None:
            await asyncio.sleep(_RETRY_S)
        return process.returncode

    def _use(self, link: _Link) -> None:
        self._link = link
        self._engines |= {found.engine: (found.incarnation, found.pid) for found in link.found}
        self._reading = asyncio.create_task(self._read(link), name="node-reader")

    async def _restart_node(self) -> None:
        """Start a node in place of a dead one."""
        try:
            self._use(await self._connect())
        except (ConfigError, EngineDied, OSError) as error:
            reason, failure = str(error), type(error).__name__
            for message in self._pending:
                self._exited(EngineExited(message.engine, message.incarnation, reason, failure))
        else:
            assert self._link is not None
            for message in self._pending:
                self._link.send(message)
        finally:
            self._pending.clear()
            self._restarting = None

    # Reading

    async def _read(self, link: _Link) -> None:
        """Emit the node's events until it is gone."""
        watching = asyncio.create_task(self._watch(link), name="node-watcher")
        with contextlib.suppress(msgspec.MsgspecError):
            while (message := await wire.read_from_node(link.reader)) is not None:
                self._message_received = True
                match message:
                    case EngineMessage():
                        self._engines[message.engine] = (message.incarnation, message.pid)
                        self._emit(message)
                    case EngineExited():
                        self._exited(message)
                    case wire.NodeBeat():
                        for usage in message.usages:
                            self._emit(usage)
        watching.cancel()
        self._link = None
        link.writer.close()
        if not self._closing:
            await self._lost(link)

    async def _watch(self, link: _Link) -> None:
        """Kill a node that is silent and hangs; a pause of this process counts as one look."""
        work, used_s = StallTracker(), cpu_s(link.pid)
        while work.still_s <= self._silence_s and work.took_s <= BUSY_LOOP_FACTOR * self._silence_s:
            self._message_received = False
            await asyncio.sleep(self._heartbeat_s)
            before_s, used_s = used_s, cpu_s(link.pid)
            if self._message_received:
                work.progress()
            else:
                work.observe(self._heartbeat_s, used_s - before_s)
        _log.warning(
            "%s is killed: it was silent, and used %.2f s of CPU time in %.1f s (half of cluster.hung_after)",
            self._what,
            work.cpu_s,
            work.took_s,
        )
        _kill(link.pid)

    async def _lost(self, link: _Link) -> None:
        """The node is gone: kill and report all of its engines."""
        engines, self._engines = self._engines, {}
        for pid in (link.pid, *(pid for _, pid in engines.values() if pid)):
            _kill(pid)
        code = await self._wait_for_exit()
        how = "" if code is None else f": {describe_end(code)}"
        for engine, (incarnation, _) in engines.items():
            reason = f"the process that owned it ended (node {link.pid}{how})"
            self._emit(EngineExited(engine, incarnation, reason))

    def _emit(self, event: BackendEvent) -> None:
        # From the loop, so that an error in the callback does not end the reading.
        asyncio.get_running_loop().call_soon(lambda: self._on_event(event))

    def _exited(self, message: EngineExited) -> None:
        if self._engines.get(message.engine, (0, 0))[0] == message.incarnation:
            del self._engines[message.engine]
        self._emit(message)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
