"""Processes that have read a model's tokenizer, of which those of grammars are copies."""

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
from shoal.execute.grammar.channel import Channel, Look
from shoal.execute.grammar.messages import ask_for_fork
from shoal.execute.grammar.watchdog import Health, Stalled
from shoal.models.conversion.run_conversion import tokenizer_folder
from shoal.models.progress import silent

_LOOK_S = 0.02
_TRIES = 5
_OWN_ENDS = 2
"""So many processes that end by themselves cannot read the tokenizer."""
_END_S = 1.0
_ENDED_BY_OTHERS = (None, -signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class GrammarModel:
    """What of a model matters to grammars."""

    folder: Path
    """Its files."""
    vocab_size: int
    """Tokens that it has logits for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output."""


class _Template:
    """The process that has read a model's tokenizer."""

    def __init__(self, model: GrammarModel) -> None:
        self._channel, its_end = socket.socketpair()
        tokenizer = tokenizer_folder(model.folder, silent) / "tokenizer.json"
        arguments = [its_end.fileno(), tokenizer, model.vocab_size, *model.eos_token_ids]
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.execute.grammar.process", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.pid = self._process.pid
        """Its number."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def fork(self) -> Channel:
        """Ask for a copy; returns the channel to it. Raises OSError if this one is gone."""
        ours, its_end = socket.socketpair()
        with its_end:
            ask_for_fork(self._channel, its_end.fileno())
        return Channel(ours, _LOOK_S)

    def ended_by_itself(self) -> bool:
        """Whether it failed, once its end of the channel is closed: nobody killed it, and it does not run."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return self._process.returncode not in _ENDED_BY_OTHERS

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class GrammarTemplates:
    """One for each model, started when it is first needed; may be used by several threads.

    is_served: whether a model is still needed.
    """

    def __init__(self, is_served: Callable[[GrammarModel], bool]) -> None:
        self._is_served = is_served
        self._lock = threading.Lock()
        self._templates: dict[GrammarModel, _Template] = {}

    def fork(self, model: GrammarModel, look: Look) -> tuple[Channel, int]:
        """Start a process for a grammar; returns the channel to it, and its number.

        look: called while it is waited for. Raises InvalidRequest where the model can follow no grammars, and
        QueueFull where the processes that could tell were killed or stopped again and again.
        """
        own_ends = 0
        for _ in range(_TRIES):
            try:
                template = self._running(model)
            except (ModelUnavailable, ModelUnsupported) as error:
                raise InvalidRequest(f"the model cannot follow grammars: {error}", "grammar") from None
            health = Health(template.pid)

            def judge(health: Health = health) -> None:
                look()
                health.look()

            try:
                channel = template.fork()
                try:
                    return channel, msgspec.msgpack.decode(channel.receive(judge), type=int)
                except BaseException:
                    channel.close()
                    raise
            except OSError as error:
                own_ends += not isinstance(error, Stalled) and template.ended_by_itself()
                self._replace(model, template)
                if own_ends == _OWN_ENDS:
                    raise InvalidRequest("the model's tokenizer knows no grammars", "grammar") from None
        raise QueueFull(f"processes for grammars were killed or stopped {_TRIES} times; try again", 1.0)

    def _running(self, model: GrammarModel) -> _Template:
        if not model.eos_token_ids:
            raise ModelUnsupported("no token of it ends an output")
        with self._lock:
            if not self._is_served(model):
                raise ModelUnavailable("its service is gone")
            template = self._templates.get(model)
            if template is None or not template.alive:
                template = self._templates[model] = _Template(model)
            return template

    def _replace(self, model: GrammarModel, template: _Template) -> None:
        """One has ended, or does not run: the next user starts another."""
        with self._lock:
            if self._templates.get(model) is template:
                del self._templates[model]
                template.close()

    def end_unused(self) -> None:
        """End those of models that are not served any more; waits for one that starts."""
        with self._lock:
            for model in [model for model in self._templates if not self._is_served(model)]:
                self._templates.pop(model).close()

    def close(self) -> None:
        """End all."""
        with self._lock:
            while self._templates:
                self._templates.popitem()[1].close()
