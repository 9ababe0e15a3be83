"""Attachment of servers to a node: one at a time; the node ends when none returns in time."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.cluster.node import wire
from shoal.cluster.node.engine_processes import Node, NodeEvent
from shoal.engine.process.child_process import PrestartedEngine
from shoal.engine.process.lifeline import PROTOCOL

# How long a server waits for its predecessor, which may be ending.
_TAKEOVER_S = 1.0


class Attachment:
    """Lets one server at a time use a node's engines; over when none has returned for too long.

    folder, host, prestarted: as in ``Node``.
    """

    def __init__(
        self, folder: Path, host: str | None = None, prestarted: PrestartedEngine | None = None
    ) -> None:
        self.node = Node(folder, self.notify, host, prestarted)
        self.over = asyncio.Event()
        """Set when the node is to end."""
        self._hello: wire.Hello | None = None
        """Of the present or the last server."""
        self._client: Callable[[wire.FromNode], None] | None = None
        self._detached = asyncio.Event()
        self._detached.set()
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None

    @property
    def used(self) -> bool:
        """Whether a server is attached."""
        return self._client is not None

    async def run(self) -> None:
        try:
            await self.over.wait()
        finally:
            self._stop_beating()
            await self.node.close()

    async def wait_detached(self) -> None:
        await self._detached.wait()

    def end_if_detached(self) -> None:
        """End, unless a server is attached."""
        if self._client is None:
            self.over.set()

    def end_if_never_used(self) -> None:
        """End, unless a server has ever attached."""
        if self._hello is None:
            self.over.set()

    async def greet(self, hello: wire.Hello, client: Callable[[wire.FromNode], None]) -> bool:
        """Attach a server, whose messages go to ``client``; returns whether it is attached.

        A refused one gets ``Refused``; one that comes while the node is ending gets nothing.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._detached.wait(), _TAKEOVER_S)
        await self.node.wait_started()
        if self.over.is_set():
            return False
        why = self._refusal_reason(hello)
        if why is not None:
            client(wire.Refused(why))
            return False
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        self._hello, self._client = hello, client
        self._detached.clear()
        client(wire.Welcome(os.getpid(), self.node.running()))
        self._beat(client, hello.heartbeat_s)
        return True

    def detach(self) -> None:
        assert self._hello is not None
        self._client = None
        self._stop_beating()
        self._detached.set()
        wait_s = self._hello.orphan_after_s if self.node.owns_any else 0.0
        self._orphan_timer = asyncio.get_running_loop().call_later(wait_s, self.over.set)

    def handle(self, message: wire.ToNode) -> None:
        """Execute an order of the server."""
        match message:
            case wire.StartEngine():
                self.node.start(message.engine, message.incarnation, message.config)
            case wire.KillEngine():
                self.node.kill(message.engine, message.incarnation)
            case wire.Shutdown():
                self.over.set()

    def notify(self, event: NodeEvent) -> None:
        """Send an event to the server, if one is attached."""
        if self._client is not None:
            self._client(event)

    def _refusal_reason(self, hello: wire.Hello) -> str | None:
        """Why a server is refused; None: it is not."""
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
