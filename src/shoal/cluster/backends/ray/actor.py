"""The actor that owns an engine's process."""

import asyncio
import contextlib
import os
import pickle
import secrets
from collections.abc import Callable
from dataclasses import replace

import ray

from shoal.cluster.backends.ray.outbox import Outbox
from shoal.cluster.node import EngineExited, EngineSaid, wire
from shoal.cluster.node.attachment import Tenancy
from shoal.cluster.node.folder import NodeFolder, folder_path
from shoal.core import ShoalError
from shoal.engine.process import lifeline
from shoal.engine.process.config import EngineConfig
from shoal.models import in_words, resolve_service

# A server that lives asks for news again at once.
_ALIVE_S = 0.5
# Between two questions of a server, which may be busy, or have made this actor and not greeted it yet.
_LEAST_GRACE_S = 5.0
_CLAIM_S = 30.0


class EngineActor:
    """A node whose server calls methods: it fetches what it is told with ``hear``, over and over.

    A server that does not ask any more is gone; nothing else tells of its end. Messages are the msgpack of
    ``cluster.node.wire``, so that servers and actors of different versions can at least refuse each other.
    """

    def __init__(self, cpus: float) -> None:
        """cpus: how many CPUs of its machine it was given."""
        self._cpus = cpus
        # Ray's workers give way to all other programs; an engine is what the machine is for.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._me = ray.get_runtime_context().current_actor
        self._folder = NodeFolder(folder_path(f"ray-{os.getpid()}-{secrets.token_hex(4)}"))
        self._tenancy = Tenancy(self._folder.path, ray.util.get_node_ip_address())
        self._greeting = asyncio.Lock()
        self._session = 0
        self._outbox = Outbox()
        self._asked = asyncio.Event()
        self._preparing: asyncio.Task[None] | None = None
        self._started: wire.StartEngine | None = None
        """The last start that was asked for."""
        self._alone: asyncio.TimerHandle | None = None
        self._grace_s = _CLAIM_S
        self._await_questions()
        self._life = asyncio.ensure_future(self._run())

    async def greet(self, hello: bytes) -> tuple[int, bytes]:
        """Let a server use the node: its number, and ``Welcome``, or ``Refused``.

        ``Welcome`` is message 0 of those that it hears. Raises RuntimeError if the node is ending.
        """
        message = wire.decode_to_node(hello)
        assert isinstance(message, wire.Hello)
        async with self._greeting:
            await self._detach_gone()
            outbox = Outbox()
            welcome = await self._tenancy.greet(message, lambda told: outbox.put(wire.encode(told)))
            if welcome:
                self._session, self._outbox = self._session + 1, outbox
                self._grace_s = max(_LEAST_GRACE_S, message.orphan_after_s)
                self._await_questions()
            if self._tenancy.over.is_set():
                raise RuntimeError("it is ending")
            answer, *_ = await outbox.read(0)
            return self._session, answer

    async def hear(self, session: int, number: int) -> list[bytes] | None:
        """The messages from this number on, as soon as there is one; None: another server uses the node."""
        if session != self._session:
            return None
        if self._alone is not None:
            self._alone.cancel()
        self._asked.set()
        messages = await self._outbox.read(number)
        if session == self._session:
            self._await_questions()
        return messages

    async def do(self, session: int, message: bytes) -> None:
        """Do what the server says; saying it again does nothing."""
        if session != self._session:
            return
        order = wire.decode_to_node(message)
        if isinstance(order, wire.StartEngine):
            if order != self._started:
                await self._stop_preparing()
                self._started = order
                self._preparing = asyncio.ensure_future(self._start(order))
        elif isinstance(order, wire.KillEngine) and not self._tenancy.node.owns_any:
            await self._stop_preparing()
            self._tenancy.tell(EngineExited(order.engine, order.incarnation, "killed before it was started"))
        else:
            self._tenancy.handle(order)

    def _await_questions(self) -> None:
        """From now on the node ends if no server asks for news."""
        if self._alone is not None:
            self._alone.cancel()
        loop = asyncio.get_running_loop()
        self._alone = loop.call_later(self._grace_s, self._tenancy.over.set)

    async def _detach_gone(self) -> None:
        """Notice whether the server that uses the node is gone."""
        if not self._tenancy.used:
            return
        self._asked.clear()
        self._outbox.put(wire.encode(wire.NodeBeat()))
        try:
            await asyncio.wait_for(self._asked.wait(), _ALIVE_S)
        except TimeoutError:
            await self._stop_preparing()
            self._tenancy.detach()

    async def _start(self, order: wire.StartEngine) -> None:
        """Start an engine once its models are here."""
        engine, incarnation = order.engine, order.incarnation
        loop = asyncio.get_running_loop()

        def report(what: str) -> None:
            said = EngineSaid(engine, incarnation, os.getpid(), lifeline.Loading(what))
            loop.call_soon_threadsafe(self._tenancy.tell, said)

        try:
            config = await asyncio.to_thread(fit_config, order.config, self._memory_share(), report)
        except (ShoalError, OSError) as error:
            failure = lifeline.describe_failure(error)
            self._tenancy.tell(EngineExited(engine, incarnation, failure.message, failure.kind))
        else:
            self._tenancy.node.start(engine, incarnation, config)

    async def _stop_preparing(self) -> None:
        """Start no engine whose models are still being fetched; what was fetched so far stays."""
        if self._preparing is not None:
            self._preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._preparing
            self._preparing = None

    def _memory_share(self) -> float:
        """The part of its machine that the engine has."""
        here = ray.get_runtime_context().get_node_id()
        cpus: float = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here)
        return min(1.0, self._cpus / max(cpus, 1.0))

    async def _run(self) -> None:
        try:
            await self._tenancy.run()
        finally:
            await self._stop_preparing()
            self._folder.remove()
            ray.kill(self._me)


def fit_config(config: bytes, memory_share: float, report: Callable[[str], None]) -> bytes:
    """A pickled ``EngineConfig`` with what is different on this machine.

    Models are found here, or fetched; the only GPU of the actor is the first; and on the CPU the engine takes
    ``memory_share`` of the memory unless its options say how much. Raises ModelUnavailable and
    ModelUnsupported.
    """
    fitted: EngineConfig = pickle.loads(config)
    progress = in_words(report)
    services = {service.name: service for service in fitted.options.services}
    folders = {name: resolve_service(services[name], progress) for name in fitted.folders}
    if fitted.options.device == "cpu":
        options = replace(fitted.options, memory_share=memory_share)
    else:
        options = replace(fitted.options, device="cuda:0")
    return pickle.dumps(replace(fitted, options=options, folders=folders))
