"""Fork servers: a process for each model that has read its tokenizer and forks grammar processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.core import InvalidRequest, ModelUnavailable, ModelUnsupported, QueueFull
from shoal.execute.grammar.channel import Channel, Poll
from shoal.execute.grammar.messages import request_fork
from shoal.execute.grammar.watchdog import ProcessStalled, Watchdog
from shoal.models.conversion.run_conversion import tokenizer_folder
from shoal.models.progress import silent

_POLL_S = 0.02
_TRIES = 5
_MAX_EXITS = 2
"""After this many servers that exit by themselves, the tokenizer counts as unreadable."""
_END_S = 1.0
_NOT_BY_ITSELF = (None, -signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class GrammarModel:
    """The properties of a model that grammars need."""

    folder: Path
    vocab_size: int
    """Number of logits, which may differ from the tokenizer's vocabulary."""
    eos_token_ids: tuple[int, ...]


class _ForkServer:
    """A running fork server."""

    def __init__(self, model: GrammarModel) -> None:
        self._channel, other_end = socket.socketpair()
        tokenizer = tokenizer_folder(model.folder, silent) / "tokenizer.json"
        arguments = [other_end.fileno(), tokenizer, model.vocab_size, *model.eos_token_ids]
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.execute.grammar.process", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> Channel:
        """Fork a grammar process; returns the channel to it. Raises OSError if this server is gone."""
        ours, other_end = socket.socketpair()
        with other_end:
            request_fork(self._channel, other_end.fileno())
        return Channel(ours, _POLL_S)

    def exited_by_itself(self) -> bool:
        """Whether it exited without being killed; called when its end of the channel is closed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return self._process.returncode not in _NOT_BY_ITSELF

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkServers:
    """A fork server for each model, started when first needed; thread-safe.

    is_served: whether a model is still needed.
    """

    def __init__(self, is_served: Callable[[GrammarModel], bool]) -> None:
        self._is_served = is_served
        self._lock = threading.Lock()
        self._servers: dict[GrammarModel, _ForkServer] = {}

    def fork(self, model: GrammarModel, poll: Poll) -> tuple[Channel, int]:
        """Start a process for a grammar; returns the channel to it, and its pid.

        poll: called during the wait. Raises InvalidRequest if the model does not support grammars, and
        QueueFull if the servers were killed or stopped repeatedly.
        """
        exits = 0
        for _ in range(_TRIES):
            try:
                server = self._running(model)
            except (ModelUnavailable, ModelUnsupported) as error:
                raise InvalidRequest(f"the model cannot follow grammars: {error}", "grammar") from None
            watchdog = Watchdog(server.pid)

            def check(watchdog: Watchdog = watchdog) -> None:
                poll()
                watchdog.check()

            try:
                channel = server.fork()
                try:
                    return channel, msgspec.msgpack.decode(channel.receive(check), type=int)
                except BaseException:
                    channel.close()
                    raise
            except OSError as error:
                exits += not isinstance(error, ProcessStalled) and server.exited_by_itself()
                self._replace(model, server)
                if exits == _MAX_EXITS:
                    raise InvalidRequest("the model's tokenizer knows no grammars", "grammar") from None
        raise QueueFull(f"processes for grammars were killed or stopped {_TRIES} times; try again", 1.0)

    def _running(self, model: GrammarModel) -> _ForkServer:
        if not model.eos_token_ids:
            raise ModelUnsupported("no token of it ends an output")
        with self._lock:
            if not self._is_served(model):
                raise ModelUnavailable("its service is gone")
            server = self._servers.get(model)
            if server is None or not server.alive:
                server = self._servers[model] = _ForkServer(model)
            return server

    def _replace(self, model: GrammarModel, server: _ForkServer) -> None:
        """Remove a server that has ended or does not run; the next call starts another."""
        with self._lock:
            if self._servers.get(model) is server:
                del self._servers[model]
                server.close()

    def end_unused(self) -> None:
        """End the servers of models that are no longer served; waits for one that is starting."""
        with self._lock:
            for model in [model for model in self._servers if not self._is_served(model)]:
                self._servers.pop(model).close()

    def close(self) -> None:
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()
