"""One engine as seen by the router: its channel, info, stats and heartbeat age."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from shoal.cluster.options import EnginePlan
from shoal.cluster.status import EngineState, EngineStatus
from shoal.core import EngineDied
from shoal.engine import wire
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.process.lifeline import Ready
from shoal.engine.stats import EngineStats

_UNAWAITED = 0
"""Key of a question whose answer is not awaited."""
Answer = TypeVar("Answer", wire.Stats, wire.Steps, wire.ServiceChanged)


class Channel(Protocol):
    def send(self, message: wire.ToEngine) -> None:
        """Send without waiting; lost if the engine is gone."""

    def close(self) -> None:
        """End the connection."""


OpenChannel = Callable[[str, str, Callable[[wire.FromEngine], None]], Channel]
"""Connects to (endpoint, session); messages go to the callback."""


class RemoteEngine:
    """An engine, running or not."""

    def __init__(self, plan: EnginePlan, clock: Callable[[], int]) -> None:
        self.plan = plan
        self.runs = False
        """Whether its process was started and has not been reported as ended."""
        self.incarnation = 0
        self.pid: int | None = None
        self.info: EngineInfo | None = None
        """As of the last time that it became ready."""
        self.transfer = ""
        """Address that receives KV of migrating requests; empty: none."""
        self.stats: EngineStats | None = None
        self._clock = clock
        self._stats_ns = 0
        self._heartbeat_ns: int | None = None
        self._channel: Channel | None = None
        self._keys = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._stats_asked = False

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def services(self) -> Mapping[str, ServiceInfo]:
        """The services that it has loaded; none unless it is connected."""
        return self.info.services if self.connected and self.info is not None else {}

    @property
    def stats_age_s(self) -> float:
        """Age of ``stats``."""
        return (self._clock() - self._stats_ns) / 1e9 if self.stats is not None else 0.0

    @property
    def heartbeat_age_s(self) -> float | None:
        """None: no heartbeat has come."""
        return None if self._heartbeat_ns is None else (self._clock() - self._heartbeat_ns) / 1e9

    def complete_status(self, status: EngineStatus) -> EngineStatus:
        """The manager's status of it, with what is known of its process."""
        return replace(
            status,
            device=self.plan.options.device,
            pid=self.pid,
            heartbeat_age_s=None if status.state is EngineState.STANDBY else self.heartbeat_age_s,
            info=self.info,
            stats=self.stats,
            stats_age_s=self.stats_age_s,
            weights_memory_bytes=self.plan.options.weights.memory_bytes,
        )

    def started(self, incarnation: int) -> None:
        """Its process was started."""
        self.incarnation, self.runs = incarnation, True

    def heartbeat(self, pid: int) -> None:
        """A heartbeat came."""
        self.pid = pid
        self._heartbeat_ns = self._clock()

    def connect(
        self,
        pid: int,
        ready: Ready,
        session: str,
        open_channel: OpenChannel,
        on_message: Callable[[wire.FromEngine], None],
    ) -> None:
        """Connect to its process, which accepts requests."""
        self.disconnect("another process took its place")
        self.info, self.transfer = ready.info, ready.transfer
        self.heartbeat(pid)
        self._stats_asked = False
        self._channel = open_channel(ready.endpoint, session, on_message)

    def disconnect(self, reason: str) -> None:
        """Close the channel; pending questions raise EngineDied."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.pid = None
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDied(reason))

    def services_changed(self, changed: wire.ServiceChanged) -> None:
        """Its services, or their limits, changed."""
        assert self.info is not None
        self.info = replace(self.info, services=changed.services, weight_bytes=changed.weight_bytes)

    def send(self, message: wire.ToEngine) -> None:
        """Send a message; lost if the engine is gone."""
        if self._channel is not None:
            self._channel.send(message)

    def ask_stats(self) -> None:
        """Request new stats, unless a request is pending."""
        if self._channel is not None and not self._stats_asked:
            self._stats_asked = True
            self._channel.send(wire.AskStats(_UNAWAITED))

    async def ask(self, question: Callable[[int], wire.ToEngine], kind: type[Answer]) -> Answer:
        """Send the question made from a key, and return the answer with that key; raises EngineDied."""
        if self._channel is None:
            raise EngineDied(f"engine {self.plan.name} does not run")
        key = next(self._keys)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        self._channel.send(question(key))
        try:
            return await future
        finally:
            self._answers.pop(key, None)

    def handle_answer(self, message: wire.Stats | wire.Steps | wire.ServiceChanged) -> None:
        if isinstance(message, wire.Stats):
            self._stats_asked = False
            self.stats, self._stats_ns = message.stats, self._clock()
        future = self._answers.get(message.key)
        if future is not None and not future.done():
            future.set_result(message)
