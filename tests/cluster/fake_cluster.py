"""A backend whose engines run in this process, in virtual time: real schedulers around a fake model.

They can be killed, hung and made to refuse to load at any moment; messages take a while and cross each other.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_builders import ByteTokenizer, build_fake, make_options
from fake_transfer import FakeTransfer

from shoal.cluster.backends.interface import BackendEvent, EngineConfig
from shoal.cluster.node import EngineExited, EngineMessage, RunningEngine
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.placing.placer import Searcher
from shoal.cluster.router.action_runner import OnDecision
from shoal.cluster.router.router import Router
from shoal.core import InvalidRequest
from shoal.engine import wire
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.process.lifeline import Beat, Ready
from shoal.engine.transition_reports import TransitionReports
from shoal.engine.weights_reports import WeightsReports

LOAD_S = 2.0
FOLDER = Path("somewhere")
LATENCY_S = 0.001


@dataclass
class FakeProcess:
    """One start of one engine."""

    engine: str
    incarnation: int
    core: Engine
    info: EngineInfo
    """Its state for the next server, once it has loaded."""
    loaded: bool = False
    on_message: Callable[[wire.FromEngine], None] | None = None
    alive: bool = True
    hung: bool = False
    arrived: list[wire.ToEngine] = field(default_factory=list)
    changing: dict[int, tuple[str, Future]] = field(default_factory=dict)
    """Services that are to come or go, by the key of the question."""
    transfer: FakeTransfer = field(init=False)
    """Where KV comes and goes."""
    weights: WeightsReports = field(init=False)
    transitions: TransitionReports = field(init=False)
    to_engine: deque[bytes] = field(default_factory=deque)
    """Messages on their way, in their order; as the next."""
    to_router: deque[bytes] = field(default_factory=deque)

    def suspects(self) -> tuple[str, ...]:
        return tuple(sorted(self.core._scheduler.request_ids))


class FakeBackend:
    """Implements ``EngineBackend``; poison: engines die of requests whose prompt begins with this token.

    kv_transferable: whether KV can go from one to another.
    """

    def __init__(
        self, seed: int = 0, poison: int | None = None, step_s: float = 0.02, kv_transferable: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.poison = poison
        self.step_s = step_s
        self.kv_transferable = kv_transferable
        self.lost_kv = 0.0
        """How probably KV is lost on its way."""
        self.declines = 0.0
        """How probably a destination says that it has no room."""
        self.processes: dict[str, FakeProcess] = {}
        self.fail_loading = 0
        self.starts = 0
        self.killed: list[str] = []
        self.stopped: list[str] = []

    async def attach(
        self, on_event: Callable[[BackendEvent], None], settings: Mapping[str, str]
    ) -> Sequence[RunningEngine]:
        self.on_event = on_event
        self.loop = asyncio.get_running_loop()
        return [
            RunningEngine(
                process.engine,
                process.incarnation,
                1000,
                _ready(process) if process.loaded else None,
            )
            for process in self.processes.values()
            if process.alive
        ]

    def start_engine(self, engine: str, incarnation: int, config: EngineConfig) -> None:
        self.starts += 1
        core, info = build_fake(config.options, config.folders)
        core._clock = self.loop.now_ns  # so that requests wait for long
        if not self.kv_transferable:
            services = {name: replace(service, kv_format="") for name, service in info.services.items()}
            info = replace(info, services=services)
        process = FakeProcess(engine, incarnation, core, info)
        process.transfer = FakeTransfer(self, process)
        process.weights = WeightsReports(core, lambda message: self.deliver(process, message))
        process.transitions = TransitionReports(core, lambda message: self.deliver(process, message))
        core.connect(process.transfer, lambda message: self.deliver(process, message))
        self.processes[engine] = process
        self.loop.call_later(config.heartbeat_s, self._beat, process, config.heartbeat_s)
        if self.fail_loading:
            self.fail_loading -= 1
            self.loop.call_later(LOAD_S / 2, self.die, process, "exit code 1")
            return
        self.loop.call_later(LOAD_S, self._load, process)

    def kill_engine(self, engine: str, incarnation: int) -> None:
        process = self.processes.get(engine)
        if process is not None and process.incarnation == incarnation:
            self.killed.append(engine)
            self.die(process, "killed by signal 9 (SIGKILL)")

    def stop_engine(self, engine: str, incarnation: int) -> None:
        process = self.processes[engine]
        assert not process.core._scheduler.request_ids, "an engine with requests is stopped"
        self.stopped.append(engine)
        self.die(process, "killed by signal 9 (SIGKILL)")

    async def close(self) -> None:
        for process in self.processes.values():
            process.alive = False

    def die(self, process: FakeProcess, reason: str) -> None:
        """The process ends now; that is known a little later."""
        if not process.alive:
            return
        process.alive = False
        event = EngineExited(process.engine, process.incarnation, reason, suspects=process.suspects())
        self.loop.call_later(self.random.uniform(0, 4 * LATENCY_S), self.on_event, event)

    def open_channel(
        self, endpoint: str, session: str, on_message: Callable[[wire.FromEngine], None]
    ) -> "FakeChannel":
        process = self.processes[endpoint.partition("/")[0]]
        process.on_message = on_message
        process.arrived.clear()
        process.core.cancel_all()
        process.weights.restart()
        return FakeChannel(self, process)

    def _load(self, process: FakeProcess) -> None:
        if process.alive:
            process.loaded = True
            self.on_event(EngineMessage(process.engine, process.incarnation, 1000, _ready(process)))
            self._step(process)

    def _beat(self, process: FakeProcess, interval_s: float) -> None:
        if not process.alive:
            return
        if not process.hung:
            self.on_event(EngineMessage(process.engine, process.incarnation, 1, Beat()))
        self.loop.call_later(interval_s, self._beat, process, interval_s)

    def _step(self, process: FakeProcess) -> None:
        if not process.alive:
            return
        self.loop.call_later(self.step_s * self.random.uniform(0.5, 1.5), self._step, process)
        if process.hung:
            return
        for message in process.arrived:
            self._handle(process, message)
        process.arrived.clear()
        if not process.alive:
            return
        events = process.core.step()
        self._answer_changes(process)
        process.weights.send()
        process.transitions.send()
        if events:
            self.deliver(process, wire.Stepped(events))

    def _handle(self, process: FakeProcess, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                requests = message.to_requests()
                try:
                    process.core.submit(*requests)
                except InvalidRequest as error:
                    self.deliver(process, wire.Refused(requests[0].id, str(error), error.param, error.code))
                if self.poison is not None and requests[0].prompt[0] == self.poison:
                    self.die(process, "killed by signal 11 (SIGSEGV)")
            case wire.Cancel():
                for request_id in message.ids:
                    process.core.cancel(request_id, complete=message.complete)
            case wire.AddService():
                added = process.core.add_service(message.service, FOLDER)
                process.changing[message.key] = message.service.name, added
            case wire.RemoveService():
                removed = process.core.remove_service(message.name, drain=message.drain)
                process.changing[message.key] = message.name, removed
            case wire.PinService():
                pinned = process.core.pin_service(message.name, message.pinned)
                process.changing[message.key] = message.name, pinned
            case wire.AskStats():
                self.deliver(process, wire.Stats(message.key, process.core.stats()))
            case wire.AskSteps():
                samples = process.core.step_samples()
                self.deliver(
                    process, wire.Steps(message.key, {name: list(samples[name]) for name in samples})
                )
            case migration_wire.Reserve() if self.random.random() < self.declines:
                self.deliver(process, migration_wire.Declined(message.migration, "there is no room"))
            case wire.Hello():
                raise AssertionError(f"nobody sends {message}")
            case _:
                process.core.migrate(message)

    def _answer_changes(self, process: FakeProcess) -> None:
        for key in [key for key, (_, future) in process.changing.items() if future.done()]:
            name, future = process.changing.pop(key)
            error = future.exception()
            services = dict(process.info.services)
            if error is None and future.result() is not None:
                services[name] = future.result()
            services = process.core.updated(services)
            process.info = replace(process.info, services=services, weight_bytes=process.core.weight_bytes)
            why = None if error is None else str(error)
            self.deliver(process, wire.ServiceChanged(key, services, process.core.weight_bytes, why))

    def deliver(self, process: FakeProcess, message: wire.FromEngine) -> None:
        """Hand a message to the router after the way over the wire; a closed channel drops it."""
        process.to_router.append(wire.encode(message))

        def arrive() -> None:
            frame = process.to_router.popleft()
            if process.on_message is not None:
                process.on_message(wire.decode_from_engine(frame))

        self.loop.call_later(LATENCY_S, arrive)


def _ready(process: FakeProcess) -> Ready:
    address = f"{process.engine}/{process.incarnation}"
    return Ready(process.info, address, address)


class FakeChannel:
    """Implements ``Channel``."""

    def __init__(self, backend: FakeBackend, process: FakeProcess) -> None:
        self._backend = backend
        self._process = process

    def send(self, message: wire.ToEngine) -> None:
        process = self._process
        process.to_engine.append(wire.encode(message))

        def arrive() -> None:
            process.arrived.append(wire.decode_to_engine(process.to_engine.popleft()))

        self._backend.loop.call_later(LATENCY_S, arrive)

    def close(self) -> None:
        self._process.on_message = None


def make_router(
    backend: FakeBackend,
    engines: int = 2,
    models: Sequence[str] = ("fake",),
    on_decision: OnDecision | None = None,
    cluster: ClusterOptions | None = None,
    search: Searcher | None = None,
    **options: object,
) -> Router:
    """A router of engines that all have the same services, not started."""
    engine_options = make_options(*models, **options)
    loop = asyncio.get_running_loop()
    return Router(
        [EnginePlan(name=str(number), options=engine_options) for number in range(engines)],
        {service.name: FOLDER for service in engine_options.services},
        {service.name: ByteTokenizer() for service in engine_options.services},
        backend,
        cluster or ClusterOptions(),
        max_queue=engine_options.max_queue,
        open_channel=backend.open_channel,
        clock=loop.now_ns,
        on_decision=on_decision,
        search=search,
    )
