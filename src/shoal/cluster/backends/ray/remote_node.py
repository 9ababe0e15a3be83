"""The server's side of an actor that owns an engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from shoal.cluster.node import wire
from shoal.core import ConfigError, EngineDied

_RETRY_S = 0.2
_BECAUSE = "The actor is dead because "


class RemoteNode:
    """A node that is an actor; on_message: called for each of its messages, in order."""

    def __init__(self, name: str, handle: Any, on_message: Callable[[wire.FromNode], None]) -> None:
        self.name = name
        """Name of its engine."""
        self._handle = handle
        self._on_message = on_message
        self._session = 0
        self._received = 0

    async def greet(self, hello: wire.Hello) -> wire.Welcome:
        """Attach to it; raises ConfigError if it refuses, EngineDied if it is gone."""
        try:
            self._session, answer = await self._handle.greet.remote(wire.encode(hello))
        except RayError as error:
            raise EngineDied(describe_death(error)) from error
        message = wire.decode_from_node(answer)
        if isinstance(message, wire.Refused):
            raise ConfigError(f"the actor of engine {self.name} cannot be used: {message.why}")
        assert isinstance(message, wire.Welcome)
        self._received = 1
        return message

    def send(self, message: wire.ToNode) -> None:
        """Send without waiting, with retries by Ray; lost if the actor is gone."""
        self._handle.do.options(max_task_retries=-1).remote(self._session, wire.encode(message))

    async def read_messages(self, heartbeat_s: float, silence_s: float) -> str:
        """Read its messages until it is gone; returns why.

        It is killed if it is silent for too long. A pause of this process counts as one heartbeat.
        """
        silent_s = 0.0
        while True:
            pending = asyncio.wrap_future(self._handle.hear.remote(self._session, self._received).future())
            while not (await asyncio.wait((pending,), timeout=heartbeat_s))[0]:
                silent_s += heartbeat_s
                if silent_s > silence_s:
                    pending.cancel()
                    self.kill()
                    return f"its actor was silent for {silent_s:g} s (cluster.hung_after)"
            try:
                messages = pending.result()
            except ActorUnavailableError:  # perhaps temporary
                await asyncio.sleep(_RETRY_S)
                silent_s += _RETRY_S
                continue
            except RayError as error:
                return describe_death(error)
            if messages is None:
                return "another server uses its actor"
            silent_s = 0.0
            self._received += len(messages)
            for message in messages:
                self._on_message(wire.decode_from_node(message))

    def kill(self) -> None:
        """Kill the actor, and its engine with it."""
        ray.kill(self._handle)


def describe_death(error: RayError) -> str:
    """The short reason in Ray's error about a dead actor."""
    text = str(error).strip()
    _, _, why = text.partition(_BECAUSE)
    return f"its actor ended: {(why or text.splitlines()[-1]).partition('. ')[0]}"
