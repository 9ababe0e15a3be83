"""The Ray actor that owns an engine's process."""

import asyncio
import contextlib
import os
import pickle
import secrets
from collections.abc import Callable
from dataclasses import replace

import ray

from shoal.cluster.backends.ray.outbox import Outbox
from shoal.cluster.node import EngineExited, EngineMessage, wire
from shoal.cluster.node.attachment import Attachment
from shoal.cluster.node.folder import NodeFolder, folder_path
from shoal.core import ShoalError
from shoal.engine.process import lifeline
from shoal.engine.process.config import EngineConfig
from shoal.models import in_words, resolve_service

# A live server polls again at once.
_ALIVE_S = 0.5
# Longest time between two polls, and until the first: the server may be busy.
_LEAST_GRACE_S = 5.0
_CLAIM_S = 30.0


class EngineActor:
    """A node as an actor: the server polls its messages with ``hear``.

    A server that stops polling is considered gone. Messages are the msgpack of ``cluster.node.wire``, so that
    servers and actors of different versions can at least refuse each other.
    """

    def __init__(self, cpus: float) -> None:
        """cpus: CPUs of its machine that Ray gave it."""
        self._cpus = cpus
        # Ray lowers the priority of its workers; an engine needs the normal one.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._me = ray.get_runtime_context().current_actor
        self._folder = NodeFolder(folder_path(f"ray-{os.getpid()}-{secrets.token_hex(4)}"))
        self._attachment = Attachment(self._folder.path, ray.util.get_node_ip_address())
        self._greeting = asyncio.Lock()
        self._session = 0
        self._outbox = Outbox()
        self._polled = asyncio.Event()
        self._preparing: asyncio.Task[None] | None = None
        self._started: wire.StartEngine | None = None
        """The last start order."""
        self._expiry: asyncio.TimerHandle | None = None
        self._grace_s = _CLAIM_S
        self._restart_expiry()
        self._life = asyncio.ensure_future(self._run())

    async def greet(self, hello: bytes) -> tuple[int, bytes]:
        """Attach a server; returns its session number, and ``Welcome`` or ``Refused``.

        ``Welcome`` is message 0 of its session. Raises RuntimeError if the node is ending.
        """
        request = wire.decode_to_node(hello)
        assert isinstance(request, wire.Hello)
        async with self._greeting:
            await self._detach_if_gone()
            outbox = Outbox()
            welcome = await self._attachment.greet(request, lambda message: outbox.put(wire.encode(message)))
            if welcome:
                self._session, self._outbox = self._session + 1, outbox
                self._grace_s = max(_LEAST_GRACE_S, request.orphan_after_s)
                self._restart_expiry()
            if self._attachment.over.is_set():
                raise RuntimeError("it is ending")
            answer, *_ = await outbox.read(0)
            return self._session, answer

    async def hear(self, session: int, number: int) -> list[bytes] | None:
        """The messages from this number on, once there is one; None: another server is attached."""
        if session != self._session:
            return None
        if self._expiry is not None:
            self._expiry.cancel()
        self._polled.set()
        messages = await self._outbox.read(number)
        if session == self._session:
            self._restart_expiry()
        return messages

    async def do(self, session: int, message: bytes) -> None:
        """Execute an order of the server; repeated orders are ignored."""
        if session != self._session:
            return
        order = wire.decode_to_node(message)
        if isinstance(order, wire.StartEngine):
            if order != self._started:
                await self._stop_preparing()
                self._started = order
                self._preparing = asyncio.ensure_future(self._start(order))
        elif isinstance(order, wire.KillEngine) and not self._attachment.node.owns_any:
            await self._stop_preparing()
            self._attachment.notify(
                EngineExited(order.engine, order.incarnation, "killed before it was started")
            )
        else:
            self._attachment.handle(order)

    def _restart_expiry(self) -> None:
        """Restart the timer after which the node ends without a poll."""
        if self._expiry is not None:
            self._expiry.cancel()
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(self._grace_s, self._attachment.over.set)

    async def _detach_if_gone(self) -> None:
        """Detach the attached server if it has stopped polling."""
        if not self._attachment.used:
            return
        self._polled.clear()
        self._outbox.put(wire.encode(wire.NodeBeat()))
        try:
            await asyncio.wait_for(self._polled.wait(), _ALIVE_S)
        except TimeoutError:
            await self._stop_preparing()
            self._attachment.detach()

    async def _start(self, order: wire.StartEngine) -> None:
        """Start an engine once its models are on this machine."""
        engine, incarnation = order.engine, order.incarnation
        loop = asyncio.get_running_loop()

        def report(what: str) -> None:
            message = EngineMessage(engine, incarnation, os.getpid(), lifeline.Loading(what))
            loop.call_soon_threadsafe(self._attachment.notify, message)

        try:
            config = await asyncio.to_thread(fit_config, order.config, self._memory_share(), report)
        except (ShoalError, OSError) as error:
            failure = lifeline.describe_failure(error)
            self._attachment.notify(EngineExited(engine, incarnation, failure.message, failure.kind))
        else:
            self._attachment.node.start(engine, incarnation, config)

    async def _stop_preparing(self) -> None:
        """Cancel a start whose models are still being fetched; downloaded files stay."""
        if self._preparing is not None:
            self._preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._preparing
            self._preparing = None

    def _memory_share(self) -> float:
        """The engine's share of its machine's memory."""
        here = ray.get_runtime_context().get_node_id()
        cpus: float = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here)
        return min(1.0, self._cpus / max(cpus, 1.0))

    async def _run(self) -> None:
        try:
            await self._attachment.run()
        finally:
            await self._stop_preparing()
            self._folder.remove()
            ray.kill(self._me)


def fit_config(config: bytes, memory_share: float, report: Callable[[str], None]) -> bytes:
    """Adapt a pickled ``EngineConfig`` to this machine.

    Models are found here, or fetched. The device is the actor's only GPU; on the CPU the engine takes
    ``memory_share`` of the memory unless its options say how much. Raises ModelUnavailable and
    ModelUnsupported.
    """
    fitted: EngineConfig = pickle.loads(config)
    progress = in_words(report)
    services = {service.name: service for service in fitted.options.services}
    folders = {name: resolve_service(services[name], progress) for name in fitted.folders}
    if fitted.options.device == "cpu":
        options = replace(fitted.options, memory_share=memory_share)
    elif fitted.options.device.startswith("cuda"):
        options = replace(fitted.options, device="cuda:0")
    else:
        options = fitted.options
    return pickle.dumps(replace(fitted, options=options, folders=folders))
