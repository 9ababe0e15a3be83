"""Who uses a node: one server at a time, and none for a while."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.cluster.node import wire
from shoal.cluster.node.engine_processes import Node, NodeEvent
from shoal.engine.process.child_process import PrestartedEngine
from shoal.engine.process.lifeline import PROTOCOL

# How long a server waits for the one before it, which may just be ending.
_TAKEOVER_S = 1.0


class Tenancy:
    """Lets one server at a time use a node's engines, and is over when none came back for too long.

    folder, host, bare: as in ``Node``.
    """

    def __init__(self, folder: Path, host: str | None = None, bare: PrestartedEngine | None = None) -> None:
        self.node = Node(folder, self.tell, host, bare)
        """The engines."""
        self.over = asyncio.Event()
        """Set when the node is to end."""
        self._hello: wire.Hello | None = None
        """Of the server that uses the node, or did so last."""
        self._client: Callable[[wire.FromNode], None] | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._orphaned: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None

    @property
    def used(self) -> bool:
        """Whether a server uses the node."""
        return self._client is not None

    async def run(self) -> None:
        """Wait until it is over, and end the engines."""
        try:
            await self.over.wait()
        finally:
            self._stop_beating()
            await self.node.close()

    async def freed(self) -> None:
        """Wait until no server uses the node."""
        await self._free.wait()

    def end_unused(self) -> None:
        """End, unless a server uses the node."""
        if self._client is None:
            self.over.set()

    def end_unclaimed(self) -> None:
        """End, unless a server has used the node."""
        if self._hello is None:
            self.over.set()

    async def greet(self, hello: wire.Hello, client: Callable[[wire.FromNode], None]) -> bool:
        """Let a server use the node, unless something is in the way; ``client`` is told everything.

        It is told nothing where the node is ending: there will be another one in a moment.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), _TAKEOVER_S)
        await self.node.settle()
        if self.over.is_set():
            return False
        why = self._why_not(hello)
        if why is not None:
            client(wire.Refused(why))
            return False
        if self._orphaned is not None:
            self._orphaned.cancel()
        self._hello, self._client = hello, client
        self._free.clear()
        client(wire.Welcome(os.getpid(), self.node.running()))
        self._beat(client, hello.heartbeat_s)
        return True

    def detach(self) -> None:
        """The server is gone."""
        assert self._hello is not None
        self._client = None
        self._stop_beating()
        self._free.set()
        wait_s = self._hello.orphan_after_s if self.node.owns_any else 0.0
        self._orphaned = asyncio.get_running_loop().call_later(wait_s, self.over.set)

    def handle(self, message: wire.ToNode) -> None:
        """Do what the server says."""
        match message:
            case wire.StartEngine():
                self.node.start(message.engine, message.incarnation, message.config)
            case wire.KillEngine():
                self.node.kill(message.engine, message.incarnation)
            case wire.Shutdown():
                self.over.set()

    def tell(self, event: NodeEvent) -> None:
        """Tell the server, if there is one, what happened."""
        if self._client is not None:
            self._client(event)

    def _why_not(self, hello: wire.Hello) -> str | None:
        """Why a server may not use the node, if it may not."""
        if self._client is not None:
            assert self._hello is not None
            return f"another server uses it (process {self._hello.pid})"
        if hello.protocol != PROTOCOL:
            return f"it speaks another protocol (protocol: {PROTOCOL} / {hello.protocol})"
        if self._hello is None or not self.node.owns_any:
            return None
        running, wanted = self._hello.settings, hello.settings
        differing = [
            f"{name}: {running.get(name, '-')} / {wanted.get(name, '-')}"
            for name in sorted({*running, *wanted})
            if running.get(name) != wanted.get(name)
        ]
        if not differing:
            return None
        return (
            f"its engines run with other settings (running / wanted: {', '.join(differing)}); "
            f"start the server with theirs, or under another --cluster-name, or wait until they end, "
            f"{self._hello.orphan_after_s:g} s after their last server"
        )

    def _beat(self, client: Callable[[wire.FromNode], None], every_s: float) -> None:
        client(wire.NodeBeat(self.node.usages()))
        self._beating = asyncio.get_running_loop().call_later(every_s, self._beat, client, every_s)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
