"""Managers in a given situation, and short words for events."""

from collections.abc import Sequence

from shoal.cluster.manager.actions import ClusterAction, Dispatch
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineEnded,
    EngineHeartbeat,
    EngineReady,
    Progressed,
    ServiceSpeed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions

SECOND = 1_000_000_000
SPEED = ServiceSpeed(prefill_s=0.001, decode_s=0.01)
KV_BYTES = 1000
"""Memory of engines that say how many tokens fill it."""


class Bench:
    """A manager on a clock that tests turn."""

    def __init__(self, options: ClusterOptions | None = None, dispatch: str = "least-requests") -> None:
        self.options = ClusterOptions() if options is None else options
        self.manager = Manager(self.options, dispatch_named(dispatch))
        self.now_ns = 0
        self.kv_format = ""
        """Of engines that become ready; "": their KV cannot move."""
        self.kv_tokens: dict[str, int] = {}
        """By service: tokens that fill the memory of engines that become ready."""
        self.host = ""
        """Where engines are that become ready; "": each has a machine of its own."""
        self.emit(Ticked())

    def emit(self, *events: ClusterEvent) -> list[ClusterAction]:
        """What follows from events that come now."""
        return [action for event in events for action in self.manager.handle(event, self.now_ns)]

    def add(
        self, *engines: str, services: Sequence[str] = ("a",), speed: ServiceSpeed = SPEED
    ) -> list[ClusterAction]:
        """Engines are added and become ready."""
        actions = []
        for engine in engines:
            actions += self.emit(EngineAdded(engine, tuple(services)))
            actions += self.ready(engine, 1, speed=speed)
        return actions

    def ready(self, engine: str, incarnation: int, *, speed: ServiceSpeed = SPEED) -> list[ClusterAction]:
        [services] = [each.services for each in self.manager.engines if each.name == engine]
        formats = dict.fromkeys(services, self.kv_format) if self.kv_format else {}
        speeds, kv_bytes = dict.fromkeys(services, speed), KV_BYTES if self.kv_tokens else 0
        pool = (kv_bytes, self.kv_tokens, 1, self.host)
        return self.emit(EngineReady(engine, incarnation, speeds, formats, *pool))

    def submit(
        self,
        request: str,
        service: str = "a",
        *,
        prompt: int = 10,
        most: int = 100,
        choices: int = 1,
        prefix: Sequence[int] = (),
    ) -> list[ClusterAction]:
        return self.emit(Submitted(request, service, prompt, most, choices, tuple(prefix)))

    def end(self, request: str, output_tokens: int | None = 5) -> list[ClusterAction]:
        return self.emit(Ended(request, output_tokens))

    def progress(self, request: str) -> list[ClusterAction]:
        return self.emit(Progressed(request))

    def die(self, engine: str, incarnation: int, *suspects: str) -> list[ClusterAction]:
        return self.emit(EngineEnded(engine, incarnation, "killed by signal 9", suspects))

    def wait(self, seconds: float, *beating: tuple[str, int]) -> list[ClusterAction]:
        """Time passes in ticks, in which the engines ``beating`` (name, incarnation) beat."""
        actions = []
        for _ in range(round(seconds * 4 / self.options.heartbeat_s)):
            self.now_ns += round(self.options.heartbeat_s / 4 * SECOND)
            for engine, incarnation in beating:
                actions += self.emit(EngineHeartbeat(engine, incarnation))
            actions += self.emit(Ticked())
        return actions


def dispatched(actions: Sequence[ClusterAction]) -> list[tuple[str, str, int]]:
    """Who is sent where, in which attempt."""
    return [(each.request, each.engine, each.attempt) for each in actions if isinstance(each, Dispatch)]
