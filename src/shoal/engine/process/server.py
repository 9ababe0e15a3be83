"""Main loop of the engine process: ``python -m shoal.engine [MODULE ...]``, started by ``child_process.py``.

It imports the named modules, reads its configuration from the ``lifeline`` on its standard input, builds the
engine and sends heartbeats. End of file there ends this process, so none is left behind. Between steps it
reads the client's messages without waiting; when idle, it waits for one.
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
from shoal.engine.process.pending_calls import PendingCall, PendingCalls
from shoal.engine.process_usage import measure_usage
from shoal.engine.transition_reports import TransitionReports
from shoal.engine.weights_reports import WeightsReports
from shoal.models.child_process import end_with_parent

Builder = Callable[..., tuple[Engine, EngineInfo]]

_log = logging.getLogger(__name__)
_POLL_MS = 2
# Limits of the work between two steps, so that running requests do not wait for new ones: submitting a
# request takes as long as a thousand tokens of its prompt do, a tenth of a millisecond or more.
_MAX_CHOICES = 32
_MAX_PROMPT_TOKENS = 2**15
# Reading a message takes much less.
_MAX_BYTES = 2**20
# All processes of a host have one clock; clocks of two hosts differ by more than a message takes.
_OTHER_CLOCK_NS = 1_000_000_000


class EngineServer:
    """Connects a client to an engine, one step at a time.

    Requests are cancelled when their client is gone, or another client connects.
    """

    def __init__(
        self,
        engine: Engine,
        link: ClientLink,
        transfer: Transfer,
        services: "Services",
    ) -> None:
        """transfer: for KV of migrations; ``link`` watches it."""
        self._engine = engine
        self._services = services
        self._link = link
        self._clock_offset_ns = 0
        """This host's clock minus the client's; 0 on one host."""
        self._pending = PendingCalls(
            lambda service, grammar, accepted: engine.prepare(service, grammar, accepted=accepted)
        )
        self._service_changes: dict[int, tuple[str, Future[ServiceInfo] | Future[None]]] = {}
        """Pending service changes, by the key of the message."""
        self._weights = WeightsReports(engine, self._send)
        self._transitions = TransitionReports(engine, self._send)
        engine.interrupted = self._has_messages
        engine.connect(transfer, self._send)

    def run(self) -> None:
        """Serve until the engine raises an error."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """Read messages, run a step and send its events; when idle, wait for a message."""
        self._take_messages()
        self._send_changes()
        events = self._engine.step()
        self._weights.send()
        self._transitions.send()
        if events:
            self._send_events(events)
        elif self._engine.idle and not self._pending.ready:
            self._link.wait(self._idle_timeout_ms())

    def _has_messages(self) -> bool:
        """Whether there are messages that the engine has not seen."""
        return self._pending.ready or self._link.has_messages()

    def _take_messages(self) -> None:
        """Read messages, and submit calls within the limits per step."""
        self._read_messages()
        choices = tokens = 0
        while choices < _MAX_CHOICES and tokens < _MAX_PROMPT_TOKENS:
            call = self._pending.pop_ready()
            if call is None:
                return
            self._submit(call)
            choices += len(call.message.choices)
            tokens += len(call.message.request.prompt)

    def _read_messages(self) -> None:
        size = 0
        while size < _MAX_BYTES:
            frame = self._link.receive()
            if frame is None:
                if self._link.lost_client():
                    self._cancel_client()
                return
            size += len(frame)
            if self._link.from_client:
                self._handle(wire.decode_to_engine(frame))
            else:
                self._handle_stranger(frame)

    def _handle_stranger(self, frame: bytes) -> None:
        """Handle a message of a peer that is not the client: Hello makes it the client."""
        try:
            message = wire.decode_to_engine(frame)
        except msgspec.MsgspecError:
            message = None
        if isinstance(message, wire.Hello) and message.protocol == wire.PROTOCOL:
            self._cancel_client()
            self._send(wire.Forgotten())
            self._link.accept_sender()
            self._weights.restart()
            self._clock_offset_ns = self._engine.now_ns() - message.now_ns
            if abs(self._clock_offset_ns) < _OTHER_CLOCK_NS:
                self._clock_offset_ns = 0
        else:
            self._link.reply(wire.encode(wire.Forgotten()))

    def _cancel_client(self) -> None:
        """Cancel all calls of the client."""
        self._pending.clear()
        self._engine.cancel_all()

    def _submit(self, call: PendingCall) -> None:
        message = call.message
        try:
            if call.lease is not None:
                call.lease.ready.result()
            requests = message.to_requests()
            if self._clock_offset_ns:
                requests = [replace(r, arrival_ns=r.arrival_ns + self._clock_offset_ns) for r in requests]
            self._engine.submit(*requests)
        except (InvalidRequest, QueueFull) as error:
            self._refuse(message, error)
        else:
            if call.lease is not None:
                self._send(wire.Accepted(message.request.id))
        finally:
            call.release()

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
                    self._pending.add(message)
                except (InvalidRequest, QueueFull) as error:
                    self._refuse(message, error)
            case wire.Cancel():
                # Choices of a call that is not submitted yet are only cancelled together, by a disconnect.
                for request_id in message.ids:
                    if not self._pending.pop(request_id):
                        self._engine.cancel(request_id, complete=message.complete)
            case wire.AskStats():
                usage = measure_usage(self._services.info.device)
                self._send(wire.Stats(message.key, replace(self._engine.stats(), usage=usage)))
            case wire.AskSteps():
                samples = self._engine.step_samples()
                self._send(wire.Steps(message.key, {name: list(each) for name, each in samples.items()}))
            case wire.AddService():
                added = self._engine.add_service(message.service, Path(message.folder))
                self._service_changes[message.key] = message.service.name, added
            case wire.RemoveService():
                removed = self._engine.remove_service(message.name, drain=message.drain)
                self._service_changes[message.key] = message.name, removed
            case wire.PinService():
                pinned = self._engine.pin_service(message.name, message.pinned)
                self._service_changes[message.key] = message.name, pinned
            case wire.Hello():
                pass
            case _:
                self._engine.migrate(message)

    def _send_changes(self) -> None:
        """Reply to service changes that are done or have failed."""
        for key in [key for key, (_, future) in self._service_changes.items() if future.done()]:
            name, future = self._service_changes.pop(key)
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
        if self._pending.preparing or self._service_changes or self._engine.needs_polling:
            return _POLL_MS
        until_ns = self._engine.idle_until_ns
        if until_ns is None:
            return None
        return max(0, (until_ns - self._engine.now_ns()) // 1_000_000 + 1)


class _StepObserver:
    """Writes plans to the crash journal, and times them."""

    def __init__(self, journal: Journal, timer: StepTimer) -> None:
        self._journal = journal
        self._timer = timer

    def begin(self, plan: StepPlan, request_ids: Sequence[str]) -> None:
        """See PlanObserver."""
        self._journal.begin(plan.number, request_ids)
        self._timer.begin(plan)

    def end(self, plan: StepPlan) -> None:
        """See PlanObserver."""
        self._journal.end(plan.number)
        self._timer.end()


class Services:
    """The current EngineInfo, which is sent to the owner and to clients when services change."""

    def __init__(self, engine: Engine, info: EngineInfo, send: Callable[[EngineInfo], None]) -> None:
        """info: from building the engine. send: sends the info to the owner, for future clients."""
        self._engine = engine
        self._info = info
        self._send = send
        send(info)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def change(self, name: str, service: ServiceInfo | None) -> None:
        """Follow a change of one service: it was added (the new info), or removed or pinned (None)."""
        added = {} if service is None else {name: service}
        services = self._engine.updated({**self._info.services, **added})
        self._info = replace(self._info, services=services, weight_bytes=self._engine.weight_bytes)
        self._send(self._info)


def serve(start: lifeline.Start, config: EngineConfig, owner: Lifeline, timer: StepTimer) -> None:
    """Build the engine and serve it until it fails; the error is sent to the owner."""

    def report(what: str) -> None:
        owner.send(lifeline.Loading(what))

    try:
        build = _find_builder(config.builder)
        gc.freeze()  # modules are never garbage: collections need not scan them
        gc.enable()
        engine, info = build(config.options, config.folders, progress=report)
        speeds = {
            name: engine.measure_speed(service, name, compiles=info.device != "cpu")
            for name, service in info.services.items()
        }
        info = replace(info, services=speeds)
        gc.collect()
        gc.freeze()  # nor are models
        engine.observer = _StepObserver(Journal(Path(start.journal)), timer)
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
    # Terminals and some supervisors signal the whole process group; the owner decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = Lifeline(socket.socket(fileno=sys.stdin.fileno()))
    for module in sys.argv[1:]:
        try:
            importlib.import_module(module)
        except Exception as error:  # it may not be needed
            _log.warning("%s cannot be imported: %s", module, error)
    try:
        start = owner.receive_start()
    except ConnectionError:
        return 1
    end_with_parent(sys.stdin.fileno())
    config: EngineConfig = pickle.loads(start.config)
    serve(start, config, owner, start_heartbeat(owner, config))
    return 1
