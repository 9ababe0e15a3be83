"""The Ray backend: one detached actor for each engine."""

import asyncio
import os
import pickle
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray

from shoal.cluster.backends.interface import BackendEvent, EngineConfig, EngineWaiting
from shoal.cluster.backends.ray.actor import EngineActor
from shoal.cluster.backends.ray.connection import connect, disconnect
from shoal.cluster.backends.ray.remote_node import RemoteNode
from shoal.cluster.backends.ray.resources import (
    ResourceNeeds,
    describe_capacity,
    fits_any_node,
    resource_needs,
    with_threads,
)
from shoal.cluster.node import EngineExited, EngineMessage, RunningEngine, wire
from shoal.cluster.options import ClusterOptions
from shoal.core import ConfigError, EngineDied
from shoal.engine.process.lifeline import PROTOCOL

_MAX_CONCURRENCY = 100
# Limit of a greeting: an actor of a dead server may be stopped, or wait for resources.
_ANSWER_S = 5.0
_ROOM_LOOK_S = 2.0
_TAKEN_RETRY_S = 0.1
_TAKEN_S = 10.0
_END_TIMEOUT_S = 20.0
# Orphan time of unnamed actors, which no other server can find: theirs may only be slow.
_UNNAMED_S = 30.0


class RayBackend:
    """Runs each engine under a detached actor, which survives a crash of this process.

    options: ``name`` names the actors' namespace, by which another server finds them; None: a private one. An
    actor that is silent for ``hung_after_s`` is killed.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._address = options.address
        self._namespace = f"shoal-{options.name or f'{os.getpid()}-{secrets.token_hex(4)}'}"
        self._orphan_after_s = _UNNAMED_S if options.name is None else options.orphan_after_s
        self._heartbeat_s = options.heartbeat_s
        self._silence_s = options.hung_after_s
        self._settings: dict[str, str] = {}
        self._on_event: Callable[[BackendEvent], None] = lambda _: None
        self._connected_here = False
        self._nodes: dict[str, RemoteNode] = {}
        self._placing: dict[str, asyncio.Task[None]] = {}
        """Engines whose actors are being created."""
        self._engines: dict[str, int] = {}
        """Incarnation of each engine that has not exited."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[RunningEngine]:
        """See EngineBackend. Also raises ConfigError if there is no Ray cluster at the address, or another
        server
        uses the actors.
        """
        self._on_event, self._settings = on_event, dict(settings)
        self._connected_here = await connect(self._address)
        try:
            names = await asyncio.to_thread(self._actor_names)
            # All are greeted before any is used: actors with other settings must stay untouched.
            answers = await asyncio.gather(*map(self._find, names))
        except BaseException:
            await self._disconnect()
            raise
        found: list[RunningEngine] = []
        for node, welcome in filter(None, answers):
            self._use(node)
            found += welcome.engines
        self._engines = {engine.engine: engine.incarnation for engine in found}
        return found

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        """See EngineBackend; does nothing after ``close``."""
        if self._closing:
            return
        self._engines[engine] = incarnation
        config = with_threads(config)
        order = wire.StartEngine(engine, incarnation, pickle.dumps(config))
        node = self._nodes.get(engine)
        if node is not None:
            node.send(order)
        else:
            self._placing[engine] = self._spawn(self._place(order, resource_needs(config)))

    def kill_engine(self, engine: str, incarnation: int) -> None:
        """See EngineBackend."""
        if self._engines.get(engine) != incarnation:
            return
        if engine in self._placing:
            self._placing[engine].cancel()
        elif engine in self._nodes:
            self._nodes[engine].send(wire.KillEngine(engine, incarnation))

    def stop_engine(self, engine: str, incarnation: int) -> None:
        """See EngineBackend: the actor ends as well, so that Ray may give up its machine."""
        node = self._nodes.get(engine)
        if node is None or self._engines.get(engine) != incarnation:
            self.kill_engine(engine, incarnation)
        else:
            node.send(wire.Shutdown())

    async def close(self) -> None:
        """See EngineBackend; closing twice does nothing."""
        self._closing = True
        for task in self._placing.values():
            task.cancel()
        for node in self._nodes.values():
            node.send(wire.Shutdown())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_TIMEOUT_S)
        for node in self._nodes.values():
            node.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    # Actors

    def _actor_names(self) -> list[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self._namespace]

    async def _find(self, name: str) -> tuple[RemoteNode, wire.Welcome] | None:
        """Attach to an actor of an earlier server; None if it is gone. One that does not answer is killed."""
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return None
        node = RemoteNode(name, handle, self._handle)
        try:
            return node, await asyncio.wait_for(node.greet(self._hello()), _ANSWER_S)
        except TimeoutError:
            node.kill()
        except EngineDied:
            pass
        return None

    async def _place(self, order: wire.StartEngine, needs: ResourceNeeds) -> None:
        """Create an actor where there is room, and start an engine there."""
        engine, incarnation = order.engine, order.incarnation
        node: RemoteNode | None = None
        greeting: asyncio.Future[wire.Welcome] | None = None
        room = "its actor was not there yet"
        try:
            node = RemoteNode(engine, await self._make_actor(engine, needs), self._handle)
            greeting = asyncio.ensure_future(node.greet(self._hello()))
            while not (await asyncio.wait((greeting,), timeout=_ROOM_LOOK_S))[0]:
                nodes, free = await asyncio.to_thread(lambda: (ray.nodes(), ray.available_resources()))
                room = describe_capacity(needs, nodes, free)
                if not fits_any_node(needs, nodes):
                    raise ConfigError(room)
                what = f"waiting for its actor: {room}"
                self._emit(EngineWaiting(engine, incarnation, what))
            greeting.result()
        except (ConfigError, EngineDied) as error:
            self._placement_failed(order, node, error)
        except asyncio.CancelledError:
            self._placement_failed(order, node, ConfigError(room))
        else:
            self._use(node)
            node.send(order)
        finally:
            del self._placing[engine]
            if greeting is not None:
                greeting.cancel()

    def _placement_failed(
        self, order: wire.StartEngine, node: RemoteNode | None, why: ConfigError | EngineDied
    ) -> None:
        if node is not None:
            node.kill()
        failure = type(why).__name__ if isinstance(why, ConfigError) else None
        self._exited(EngineExited(order.engine, order.incarnation, str(why), failure))

    async def _make_actor(self, name: str, needs: ResourceNeeds) -> Any:
        """Create an actor; the existing one if another server keeps the name."""
        make = ray.remote(EngineActor).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=_MAX_CONCURRENCY,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            scheduling_strategy="SPREAD",
        )
        until = time.monotonic() + _TAKEN_S
        while True:
            try:
                return await asyncio.to_thread(make.remote, needs.cpus)
            except ValueError:  # the name is taken, perhaps by a killed actor for a moment
                if time.monotonic() > until:
                    return await asyncio.to_thread(ray.get_actor, name, self._namespace)
                await asyncio.sleep(_TAKEN_RETRY_S)

    def _hello(self) -> wire.Hello:
        return wire.Hello(PROTOCOL, os.getpid(), self._settings, self._heartbeat_s, self._orphan_after_s)

    def _use(self, node: RemoteNode) -> None:
        self._nodes[node.name] = node
        self._spawn(self._follow(node))

    async def _follow(self, node: RemoteNode) -> None:
        """Read messages of an actor until it, and its engine, is gone."""
        reason = await node.read_messages(self._heartbeat_s, self._silence_s)
        del self._nodes[node.name]
        if node.name in self._engines:
            self._exited(EngineExited(node.name, self._engines[node.name], reason))

    # Events

    def _handle(self, message: wire.FromNode) -> None:
        match message:
            case EngineMessage():
                self._emit(message)
            case EngineExited():
                self._exited(message)
            case wire.NodeBeat():
                for usage in message.usages:
                    self._emit(usage)

    def _exited(self, message: EngineExited) -> None:
        if self._engines.get(message.engine) == message.incarnation:
            del self._engines[message.engine]
        self._emit(message)

    def _emit(self, event: BackendEvent) -> None:
        # From the loop, so that an error in the callback does not end the reading.
        if not self._closing:
            asyncio.get_running_loop().call_soon(self._on_event, event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _disconnect(self) -> None:
        if self._connected_here:
            self._connected_here = False
            await asyncio.to_thread(disconnect)
