"""The processes of grammars, as the engine sees them: started when a grammar is first asked for, and kept."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.core import Grammar, InvalidRequest, ModelUnavailable, ModelUnsupported, QueueFull
from shoal.execute.grammar_messages import COMPILE_CPU_S, MEMORY_BYTES, Compiled, Start, ask_for_fork
from shoal.models.conversion import tokenizer_folder
from shoal.models.progress import silent

MAX_PROCESSES = 64
"""Grammars that may be in use at once."""
_COMPILERS = 4  # most wait for a process of the lowest priority
# Reading a tokenizer takes seconds; the other times are bounded by the CPU time of the process.
_START_TIMEOUT_S = 120.0
_COMPILE_TIMEOUT_S = 30.0

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class GrammarModel:
    """What of a model matters to grammars."""

    folder: Path
    """Its files."""
    vocab_size: int
    """Tokens that it has logits for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output."""


@dataclass(slots=True, eq=False)
class GrammarProcess:
    """A process that computes the masks of one grammar."""

    connection: Connection
    """Carries its messages."""
    pid: int
    """Its number."""
    sequences: set[int] = field(default_factory=set)
    """Numbers of the sequences that follow the grammar."""
    left: list[int] = field(default_factory=list)
    """Sequences that are gone and that the process still remembers."""

    def kill(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class _Template:
    """The process that has read a model's tokenizer, of which those of grammars are copies."""

    def __init__(self, model: GrammarModel) -> None:
        self._channel, its_end = socket.socketpair()
        tokenizer = tokenizer_folder(model.folder, silent) / "tokenizer.json"
        arguments = [its_end.fileno(), tokenizer, model.vocab_size, *model.eos_token_ids]
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.execute.grammar_process", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def fork(self) -> Connection:
        """Ask for a copy; returns the connection to it."""
        ours, its_end = socket.socketpair()
        with its_end:
            ask_for_fork(self._channel, its_end.fileno())
        return Connection(ours.detach())

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class GrammarPool:
    """Processes by model and grammar; may be used by several threads. models: by service name."""

    def __init__(self, models: Mapping[str, GrammarModel]) -> None:
        self._models = dict(models)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._compiling = threading.Lock()
        """Held by the one that compiles at the priority of forward passes."""
        self._templates: dict[GrammarModel, _Template] = {}
        self._processes: OrderedDict[tuple[GrammarModel, Grammar], Future[GrammarProcess]] = OrderedDict()
        """Those that start or run, the one used last at the end."""
        self._threads = ThreadPoolExecutor(_COMPILERS, "shoal-grammars")
        self._closed = False

    def prepare(self, service: str, grammar: Grammar) -> Future[GrammarProcess]:
        """Start the process of a grammar, if there is none; returns at once.

        The future raises InvalidRequest where the grammar cannot be used. Raises QueueFull where too many
        others are in use.
        """
        model = self._models.get(service)
        if model is None:
            raise InvalidRequest(f"model {service!r} is not served here", "model", "model_not_found")
        key = (model, grammar)
        with self._lock:
            known = self._processes.get(key)
            if known is None:
                self._make_room()
                known = self._processes[key] = self._threads.submit(self._start, model, grammar)
            self._processes.move_to_end(key)
        known.add_done_callback(lambda done: self._forget_failed(key, done))
        return known

    def end(self, process: GrammarProcess) -> None:
        """Kill a process; the grammar's next user starts another."""
        process.kill()
        with self._lock:
            for key, future in list(self._processes.items()):
                if future.done() and not future.exception() and future.result() is process:
                    del self._processes[key]

    def add_service(self, service: str, model: GrammarModel) -> None:
        """Requests of one more service may follow grammars."""
        self._models[service] = model

    def remove_service(self, service: str) -> None:
        """A service is gone: unless another has its model, all processes end that know it."""
        model = self._models.pop(service)
        if self._is_served(model):
            return
        with self._lock:
            gone = [self._processes.pop(key) for key in list(self._processes) if key[0] == model]
        for future in gone:
            future.add_done_callback(_kill)
        if model in self._templates:
            self._threads.submit(self._end_template, model)  # one that starts may take seconds

    def _end_template(self, model: GrammarModel) -> None:
        with self._starting:
            if not self._is_served(model) and model in self._templates:
                self._templates.pop(model).close()

    def _is_served(self, model: GrammarModel) -> bool:
        return model in list(self._models.values())  # a copy: other threads may change it meanwhile

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            futures = list(self._processes.values())
        for template in self._templates.values():
            template.close()
        self._threads.shutdown(cancel_futures=True)
        for future in futures:
            _kill(future)

    def _make_room(self) -> None:
        """End processes that nobody uses, beginning with the one used longest ago."""
        for key, future in list(self._processes.items()):
            if len(self._processes) < MAX_PROCESSES:
                return
            if future.done() and not future.exception() and not future.result().sequences:
                future.result().kill()
                del self._processes[key]
        if len(self._processes) >= MAX_PROCESSES:
            raise QueueFull(f"{MAX_PROCESSES} different grammars are in use, and no more may be", 1.0)

    def _forget_failed(self, key: tuple[GrammarModel, Grammar], done: Future[GrammarProcess]) -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._processes.get(key) is done:
                    del self._processes[key]

    def _start(self, model: GrammarModel, grammar: Grammar) -> GrammarProcess:
        """Start the process of a grammar; tried out before, so that others do not hold up forward passes."""
        self._compile(model, Start(grammar, trial=True)).connection.close()
        with self._compiling:
            return self._compile(model, Start(grammar, trial=False))

    def _compile(self, model: GrammarModel, start: Start) -> GrammarProcess:
        try:
            connection = self._fork(model)
        except (ModelUnavailable, ModelUnsupported) as error:
            raise InvalidRequest(f"the model cannot follow grammars: {error}", "grammar") from None
        try:
            pid = _receive(connection, int, _START_TIMEOUT_S, "the model's tokenizer knows no grammars")
            connection.send_bytes(msgspec.msgpack.encode(start))
            limits = f"{COMPILE_CPU_S:g} seconds of CPU, {MEMORY_BYTES >> 20} MiB of memory or the stack"
            too_much = f"compiling it takes more than {limits}; simplify it"
            compiled = _receive(connection, Compiled, _COMPILE_TIMEOUT_S, too_much)
            if compiled.error is not None:
                raise InvalidRequest(compiled.error, "grammar")
        except BaseException:
            connection.close()
            raise
        return GrammarProcess(connection, pid)

    def _fork(self, model: GrammarModel) -> Connection:
        if not model.eos_token_ids:
            raise ModelUnsupported("no token of it ends an output")
        with self._starting:
            if not self._is_served(model):
                raise ModelUnavailable("its service is gone")
            template = self._templates.get(model)
            if template is None or not template.alive:
                template = self._templates[model] = _Template(model)
            return template.fork()


def _kill(started: Future[GrammarProcess]) -> None:
    """End a process as soon as it has started, if it does."""
    if not started.cancelled() and not started.exception():
        started.result().kill()


def _receive(connection: Connection, kind: type[Message], timeout_s: float, otherwise: str) -> Message:
    """The next message; raises an InvalidRequest that says ``otherwise`` where none comes."""
    try:
        if connection.poll(timeout_s):
            return msgspec.msgpack.decode(connection.recv_bytes(), type=kind)
    except (EOFError, ConnectionError):
        pass
    raise InvalidRequest(otherwise, "grammar")
