"""The engine process: ``python -m shoal.engine``, started by ``launch``.

Its standard input is one end of a pair of sockets. It reads its configuration there, and then gives a
sign of life every second, whatever its engine does. End of file there ends this process, so none is
left behind. Between steps it takes messages without waiting; idle, it waits for one.
"""

import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq

from shoal.core import InvalidRequest, QueueFull, TokenEvent
from shoal.engine import wire
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.options import EngineOptions
from shoal.models.child import end_with_parent

Builder = Callable[..., tuple[Engine, EngineInfo]]

_log = logging.getLogger(__name__)
_LINGER_MS = 2000
_PREPARING_POLL_MS = 2
_BEAT_S = 1.0
# What is taken between two steps, beyond which running requests would wait for new ones: a request takes
# about as long to submit as a thousand tokens of prompt do, a tenth of a millisecond or more.
_MOST_CHOICES = 32
_MOST_TOKENS = 2**15
# Reading a message takes much less.
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What an engine process is told at its start.

    endpoint: ZeroMQ address to connect to. builder: "module:function" with the signature of
    ``build_engine``.
    """

    endpoint: str
    options: EngineOptions
    folders: Mapping[str, Path]
    builder: str


class EngineServer:
    """Carries messages between a socket and an engine, one step at a time."""

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._running = True
        # Calls that were read and wait to be submitted, by the id of their first choice.
        self._arrived: dict[str, wire.Submit] = {}
        self._preparing: dict[int, Future[Any]] = {}
        """Grammars that are being made ready, by the key of the question."""
        self._changing: dict[int, Future[ServiceInfo] | Future[None]] = {}
        """Services that are to come or go, by the key of the question."""
        engine.interrupted = self._has_messages

    def run(self) -> None:
        """Serve until told to shut down; an engine's error is raised."""
        while self._running:
            self._take_messages()
            if not self._running:
                return
            self._send_prepared()
            self._send_changes()
            events = self._engine.step()
            if events:
                self._send_events(events)
            elif self._engine.waits and not self._arrived:
                self._socket.poll(self._idle_timeout_ms())

    def _has_messages(self) -> bool:
        """Whether something has come that the engine does not know of."""
        return bool(self._arrived) or bool(self._socket.poll(0))

    def _take_messages(self) -> None:
        """Read what has come, and submit no more of it than a step may wait for."""
        self._read_messages()
        choices = tokens = 0
        while self._arrived and choices < _MOST_CHOICES and tokens < _MOST_TOKENS:
            message = self._arrived.pop(next(iter(self._arrived)))
            self._submit(message)
            choices += len(message.choices)
            tokens += len(message.request.prompt)

    def _read_messages(self) -> None:
        size = 0
        while self._running and size < _MOST_BYTES:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(wire.decode_to_engine(frame))
            size += len(frame)

    def _submit(self, message: wire.Submit) -> None:
        try:
            self._engine.submit(*message.to_requests())
        except InvalidRequest as error:
            self._send(wire.Refused(message.request.id, str(error), error.param, error.code))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                self._arrived[message.request.id] = message
            case wire.Cancel():
                # The choices of a call that has not been submitted are cancelled together: clients left.
                for request_id in message.ids:
                    if self._arrived.pop(request_id, None) is None:
                        self._engine.cancel(request_id, complete=message.complete)
            case wire.Prepare():
                self._prepare(message)
            case wire.AskStats():
                self._send(wire.Stats(message.key, self._engine.stats()))
            case wire.AddService():
                added = self._engine.add_service(message.service, Path(message.folder))
                self._changing[message.key] = added
            case wire.RemoveService():
                removed = self._engine.remove_service(message.name, drain=message.drain)
                self._changing[message.key] = removed
            case wire.Shutdown():
                self._running = False

    def _prepare(self, message: wire.Prepare) -> None:
        try:
            self._preparing[message.key] = self._engine.prepare(message.service, message.grammar)
        except InvalidRequest as error:
            self._send(wire.Prepared(message.key, str(error)))
        except QueueFull as error:
            self._send(wire.Prepared(message.key, str(error), error.retry_after_s))

    def _send_prepared(self) -> None:
        """Answer for the grammars that are ready, or cannot be used."""
        for key in [key for key, future in self._preparing.items() if future.done()]:
            error = self._preparing.pop(key).exception()
            if error is not None and not isinstance(error, InvalidRequest):
                _log.error("a grammar could not be made ready", exc_info=error)
            self._send(wire.Prepared(key, None if error is None else str(error)))

    def _send_changes(self) -> None:
        """Answer for the services that have come or gone, or cannot."""
        for key in [key for key, future in self._changing.items() if future.done()]:
            future = self._changing.pop(key)
            error = future.exception()
            if error is None:
                self._send(wire.ServiceChanged(key, future.result()))
                continue
            if not wire.is_actionable(error):
                _log.error("a service could not be changed", exc_info=error)
            self._send(wire.ServiceChanged(key, error=str(error) or type(error).__name__))

    def _send_events(self, events: list[TokenEvent]) -> None:
        started = time.monotonic_ns()
        self._send(wire.Stepped(events))
        self._engine.add_reply_time(time.monotonic_ns() - started)

    def _send(self, message: wire.FromEngine) -> None:
        self._socket.send(wire.encode(message))

    def _idle_timeout_ms(self) -> int | None:
        if self._preparing or self._changing:
            return _PREPARING_POLL_MS
        until_ns = self._engine.idle_until_ns
        if until_ns is None:
            return None
        return max(0, (until_ns - self._engine.now_ns()) // 1_000_000 + 1)


def serve(config: ProcessConfig, socket: "zmq.Socket[bytes]") -> bool:
    """Build the engine and serve it; returns whether it ended because it was told to."""

    def report(what: str) -> None:
        socket.send(wire.encode(wire.Loading(what)))

    try:
        build = _find_builder(config.builder)
        engine, info = build(config.options, config.folders, progress=report)
        gc.collect()
        gc.freeze()  # models and modules never die: collections during steps need not walk them
        socket.send(wire.encode(wire.Ready(info)))
        try:
            EngineServer(engine, socket).run()
        finally:
            engine.close()
    except Exception as error:
        if not wire.is_actionable(error):
            traceback.print_exc()
        socket.send(wire.encode(wire.describe_failure(error)))
        return False
    return True


def _find_builder(name: str) -> Builder:
    module, _, function = name.partition(":")
    return cast(Builder, getattr(importlib.import_module(module), function))


def _beat() -> None:
    """Give a sign of life every second, whatever the engine does, until the parent is gone."""
    parent = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with suppress(ConnectionError):
        while True:
            with suppress(BlockingIOError):  # a parent that does not read has enough of them
                parent.send(b".", socket.MSG_DONTWAIT)
            time.sleep(_BEAT_S)


def main() -> int:
    """Run one engine until its parent shuts it down or is gone; returns the exit status."""
    # A terminal and some supervisors signal the whole group; the parent decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config: ProcessConfig = pickle.load(sys.stdin.buffer)
    end_with_parent(sys.stdin.fileno())
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()
    context = zmq.Context()
    channel = context.socket(zmq.PAIR)
    channel.set_hwm(0)
    channel.connect(config.endpoint)
    ended = serve(config, channel)
    channel.close(linger=_LINGER_MS)
    context.term()
    return 0 if ended else 1
