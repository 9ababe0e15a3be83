"""The engine process: ``python -m shoal.engine [MODULE ...]``, started by ``PrestartedEngine``.

It imports the modules that are named. Its standard input is its lifeline (see there): it reads what it is to
be, and then gives signs of life, whatever its engine does. End of file there ends this process, so none is
left behind. Between steps it takes its client's messages without waiting; idle, it waits for one.
"""

import gc
import importlib
import logging
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from shoal.core import InvalidRequest, QueueFull, StepPlan, TokenEvent
from shoal.engine import wire
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.migration.transfer import Transfer, transfer_address
from shoal.engine.process import lifeline
from shoal.engine.process.client_link import ClientLink
from shoal.engine.process.config import EngineConfig
from shoal.engine.process.crash_journal import Journal
from shoal.engine.process.hang_detector import StepTimer
from shoal.engine.process.heartbeat import start_heartbeat
from shoal.engine.process.lifeline import Lifeline
from shoal.engine.process.pending_calls import Arrival, Arrivals
from shoal.models.child_process import end_with_parent

Builder = Callable[..., tuple[Engine, EngineInfo]]

_log = logging.getLogger(__name__)
_POLL_MS = 2
# What is taken between two steps, beyond which running requests would wait for new ones: a request takes
# about as long to submit as a thousand tokens of prompt do, a tenth of a millisecond or more.
_MOST_CHOICES = 32
_MOST_TOKENS = 2**15
# Reading a message takes much less.
_MOST_BYTES = 2**20
# All processes of a host have one clock; those of two hosts differ by more than a message takes.
_OTHER_CLOCK_NS = 1_000_000_000


class EngineServer:
    """Carries messages between a client and an engine, one step at a time.

    Requests live as long as their client: they are cancelled when it is gone, or another one comes.
    """

    def __init__(
        self,
        engine: Engine,
        link: ClientLink,
        transfer: Transfer,
        services: "Services",
    ) -> None:
        """transfer: where KV comes and goes, which ``link`` watches.
        services: those of the engine."""
        self._engine = engine
        self._services = services
        self._link = link
        self._ahead_ns = 0
        """How much more this host's clock shows than the client's."""
        self._arrivals = Arrivals(
            lambda service, grammar, accepted: engine.prepare(service, grammar, accepted=accepted)
        )
        self._changing: dict[int, tuple[str, Future[ServiceInfo] | Future[None]]] = {}
        """Services that are to come or go, by the key of the question."""
        engine.interrupted = self._has_messages
        engine.connect(transfer, self._send)

    def run(self) -> None:
        """Serve for ever; an engine's error is raised."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """Take messages, make a step, and answer; where there is no step to make, wait for something."""
        self._take_messages()
        self._send_changes()
        events = self._engine.step()
        if events:
            self._send_events(events)
        elif self._engine.idle and not self._arrivals.waits:
            self._link.wait(self._idle_timeout_ms())

    def _has_messages(self) -> bool:
        """Whether something has come that the engine does not know of."""
        return self._arrivals.waits or self._link.has_news()

    def _take_messages(self) -> None:
        """Read what has come, and submit no more of it than a step may wait for."""
        self._read_messages()
        choices = tokens = 0
        while choices < _MOST_CHOICES and tokens < _MOST_TOKENS:
            arrival = self._arrivals.take()
            if arrival is None:
                return
            self._submit(arrival)
            choices += len(arrival.message.choices)
            tokens += len(arrival.message.request.prompt)

    def _read_messages(self) -> None:
        size = 0
        while size < _MOST_BYTES:
            frame = self._link.receive()
            if frame is None:
                if self._link.lost_client():
                    self._forget_client()
                return
            size += len(frame)
            if self._link.from_client:
                self._handle(wire.decode_to_engine(frame))
            else:
                self._meet(frame)

    def _meet(self, frame: bytes) -> None:
        """Somebody who is not the client says something: only Hello makes them the client."""
        try:
            message = wire.decode_to_engine(frame)
        except msgspec.MsgspecError:
            message = None
        if isinstance(message, wire.Hello) and message.protocol == wire.PROTOCOL:
            self._forget_client()
            self._send(wire.Forgotten())
            self._link.welcome()
            self._ahead_ns = self._engine.now_ns() - message.now_ns
            if abs(self._ahead_ns) < _OTHER_CLOCK_NS:
                self._ahead_ns = 0
        else:
            self._link.reply(wire.encode(wire.Forgotten()))

    def _forget_client(self) -> None:
        """Cancel all that the client has asked for."""
        self._arrivals.clear()
        self._engine.cancel_all()

    def _submit(self, arrival: Arrival) -> None:
        message = arrival.message
        try:
            if arrival.lease is not None:
                arrival.lease.ready.result()
            requests = message.to_requests()
            if self._ahead_ns:
                requests = [replace(r, arrival_ns=r.arrival_ns + self._ahead_ns) for r in requests]
            self._engine.submit(*requests)
        except (InvalidRequest, QueueFull) as error:
            self._refuse(message, error)
        else:
            if arrival.lease is not None:
                self._send(wire.Accepted(message.request.id))
        finally:
            arrival.release()

    def _refuse(self, message: wire.Submit, error: InvalidRequest | QueueFull) -> None:
        request_id, why = message.request.id, str(error)
        if isinstance(error, QueueFull):
            self._send(wire.Refused(request_id, why, retry_after_s=error.retry_after_s))
        else:
            self._send(wire.Refused(request_id, why, error.param, error.code))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                try:
                    self._arrivals.add(message)
                except (InvalidRequest, QueueFull) as error:
                    self._refuse(message, error)
            case wire.Cancel():
                # The choices of a call that has not been submitted are cancelled together: clients left.
                for request_id in message.ids:
                    if not self._arrivals.pop(request_id):
                        self._engine.cancel(request_id, complete=message.complete)
            case wire.AskStats():
                self._send(wire.Stats(message.key, self._engine.stats()))
            case wire.AddService():
                added = self._engine.add_service(message.service, Path(message.folder))
                self._changing[message.key] = message.service.name, added
            case wire.RemoveService():
                removed = self._engine.remove_service(message.name, drain=message.drain)
                self._changing[message.key] = message.name, removed
            case wire.Hello():
                pass
            case _:
                self._engine.migrate(message)

    def _send_changes(self) -> None:
        """Answer for the services that have come or gone, or cannot."""
        for key in [key for key, (_, future) in self._changing.items() if future.done()]:
            name, future = self._changing.pop(key)
            error = future.exception()
            why: str | None = None
            if error is None:
                self._services.change(name, future.result())
            else:
                why = str(error) or type(error).__name__
                if not lifeline.is_actionable(error):
                    _log.error("a service could not be changed", exc_info=error)
            info = self._services.info
            self._send(wire.ServiceChanged(key, dict(info.services), info.weight_bytes, why))

    def _send_events(self, events: list[TokenEvent]) -> None:
        started = time.monotonic_ns()
        self._send(wire.Stepped(events))
        self._engine.add_reply_time(time.monotonic_ns() - started)

    def _send(self, message: wire.FromEngine) -> None:
        self._link.send(wire.encode(message))

    def _idle_timeout_ms(self) -> int | None:
        if self._arrivals.preparing or self._changing or self._engine.needs_polling:
            return _POLL_MS
        until_ns = self._engine.idle_until_ns
        if until_ns is None:
            return None
        return max(0, (until_ns - self._engine.now_ns()) // 1_000_000 + 1)


class _PlanRecord:
    """Notes whose plans are computed, and times them."""

    def __init__(self, journal: Journal, watch: StepTimer) -> None:
        self._journal = journal
        self._watch = watch

    def begin(self, plan: StepPlan, request_ids: Sequence[str]) -> None:
        """See PlanObserver."""
        self._journal.begin(plan.number, request_ids)
        self._watch.begin(plan)

    def end(self, plan: StepPlan) -> None:
        """See PlanObserver."""
        self._journal.end(plan.number)
        self._watch.end()


class Services:
    """What is told of the services that there are: to clients that change them, and to the owner."""

    def __init__(self, engine: Engine, info: EngineInfo, tell: Callable[[EngineInfo], None]) -> None:
        """info: as the engine was built. tell: tells the owner, for clients to come."""
        self._engine = engine
        self._info = info
        self._tell = tell
        tell(info)

    @property
    def info(self) -> EngineInfo:
        """Of the engine with the services that there are."""
        return self._info

    def change(self, name: str, service: ServiceInfo | None) -> None:
        """A service has come, or has gone (None); others may have more room now, or less."""
        come = {} if service is None else {name: service}
        services = self._engine.with_current_capacity({**self._info.services, **come})
        self._info = replace(self._info, services=services, weight_bytes=self._engine.weight_bytes)
        self._tell(self._info)


def serve(start: lifeline.Start, config: EngineConfig, owner: Lifeline, watch: StepTimer) -> None:
    """Build the engine and serve it until it fails, which is told."""

    def report(what: str) -> None:
        owner.send(lifeline.Loading(what))

    try:
        build = _find_builder(config.builder)
        gc.freeze()  # modules never die: collections need not walk them
        gc.enable()
        engine, info = build(config.options, config.folders, progress=report)
        speeds = {
            name: engine.measure_speed(service, name, compiles=info.device != "cpu")
            for name, service in info.services.items()
        }
        info = replace(info, services=speeds)
        gc.collect()
        gc.freeze()  # nor do models
        engine.observer = _PlanRecord(Journal(Path(start.journal)), watch)
        link, transfer = ClientLink(start.bind), Transfer(transfer_address(start.bind))
        link.watch(transfer.socket)
        services = Services(
            engine,
            info,
            lambda info: owner.send(lifeline.Ready(info, link.endpoint, transfer.endpoint)),
        )
        try:
            EngineServer(engine, link, transfer, services).run()
        finally:
            engine.close()
            link.close()
            transfer.close()
    except Exception as error:
        if not lifeline.is_actionable(error):
            traceback.print_exc()
        with suppress(ConnectionError):
            owner.send(lifeline.describe_failure(error))


def _find_builder(name: str) -> Builder:
    module, _, function = name.partition(":")
    return cast(Builder, getattr(importlib.import_module(module), function))


def main() -> int:
    """Run one engine until it fails or its owner is gone; returns the exit status."""
    # A terminal and some supervisors signal the whole group; the owner decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = Lifeline(socket.socket(fileno=sys.stdin.fileno()))
    for module in sys.argv[1:]:
        try:
            importlib.import_module(module)
        except Exception as error:  # whether it is needed is not known yet
            _log.warning("%s cannot be imported: %s", module, error)
    try:
        start = owner.receive_start()
    except ConnectionError:
        return 1
    end_with_parent(sys.stdin.fileno())
    config: EngineConfig = pickle.loads(start.config)
    serve(start, config, owner, start_heartbeat(owner, config))
    return 1
