"""What follows one grammar: a process that computes masks, and the thread that starts, asks and replaces it.

Nobody but that thread ever waits for the process. What the process knows follows from the output tokens, so
that another can take its place: it is told them from the beginning.
"""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import numpy as np

from shoal.core import Failure, FinishReason, Grammar, InvalidRequest, QueueFull
from shoal.execute.grammar.channel import Channel, Look
from shoal.execute.grammar.messages import COMPILE_CPU_S, MEMORY_BYTES, Compiled, Masked, Start, Step, Told
from shoal.execute.grammar.watchdog import Health, Stalled, TooSlow

_log = logging.getLogger(__name__)

Fork = Callable[[Look], tuple[Channel, int]]
"""Starts a process: the channel to it, and its number. Raises InvalidRequest where the model has none, and
QueueFull where none could be started."""

MASK_CPU_S = 0.1
"""CPU time for one mask."""
TOLD_CPU_S = 0.001
"""CPU time for each output token that a process is told."""
MOST_DEATHS = 3
"""So many processes of a grammar that end one after another, without an answer, are its own fault."""
_TRIES = 2
_TOO_SLOW = Failure("the grammar takes too long: its next token could not be found in time; simplify it")
_LOST = Failure(f"the processes of the grammar have ended {MOST_DEATHS} times in a row; try again")


class Question:
    """Which tokens may come next in one sequence. Its asker reads the answer when it is ``done``."""

    __slots__ = ("done", "end", "failure", "first", "mask", "number", "tokens", "worker")

    def __init__(
        self, number: int, tokens: Sequence[int], first: int, worker: "GrammarWorker | None"
    ) -> None:
        """tokens: of the sequence, its output behind the ``first``; may get longer, which does not count."""
        self.number = number
        self.tokens = tokens
        self.first = first
        self.end = len(tokens)
        self.worker = worker
        """Who is asked."""
        self.mask: np.ndarray | None = None
        """uint32 [words]: bit b of word w says whether token 32 * w + b may come next."""
        self.failure: Failure | None = None
        """Why it is unknown."""
        self.done = False

    def answer(self, mask: np.ndarray | None, failure: Failure | None = None) -> None:
        """It is answered."""
        self.mask, self.failure = mask, failure
        self.done = True


class StartGates:
    """Keeps the CPU time of all compilations together within bounds."""

    def __init__(self, at_once: int) -> None:
        """at_once: grammars that are tried out, at the lowest priority."""
        self.trying = threading.BoundedSemaphore(at_once)
        """Held by those that are tried out."""
        self.compiling = threading.Lock()
        """Held by the one that compiles at the priority of masks."""


class _Closed(Exception):
    """The worker is to end."""


class GrammarWorker:
    """Follows one grammar; ``compiled`` says whether that is possible.

    answered: notified after answers.
    """

    def __init__(
        self, grammar: Grammar, fork: Fork, gates: StartGates, answered: threading.Condition
    ) -> None:
        self.compiled: Future[None] = Future()
        """Raises InvalidRequest where the grammar cannot be used, QueueFull where nobody could find out."""
        self.num_leases = 0
        """Kept by the pool."""
        self.pid: int | None = None
        """Number of its process, if it has one."""
        self._grammar = grammar
        self._fork = fork
        self._gates = gates
        self._answered = answered
        self._inbox: queue.SimpleQueue[Question | int | None] = queue.SimpleQueue()
        self._closed = False
        self._channel: Channel | None = None
        self._waiting: dict[int, Question] = {}
        """Questions without answer, by sequence."""
        self._told: dict[int, int] = {}
        """Output tokens that the process knows, by sequence."""
        self._left: list[int] = []
        """Sequences that are gone, and that the process still remembers."""
        self._deaths = 0
        self._thread = threading.Thread(target=self._run, name="shoal-grammar", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the grammar cannot be followed."""
        return self.compiled.done() and self.compiled.exception() is not None

    def ask(self, question: Question) -> None:
        """Ask for a mask; returns at once."""
        self._inbox.put(question)

    def forget(self, number: int) -> None:
        """A sequence is gone."""
        self._inbox.put(number)

    def close(self) -> None:
        """End the process; returns at once."""
        self._closed = True
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            try:
                self._start()
            except (InvalidRequest, QueueFull) as error:
                self.compiled.set_exception(error)
            except _Closed:
                raise
            except Exception as error:
                _log.exception("a grammar could not be made ready")
                why = f"the grammar could not be made ready: {error}"
                self.compiled.set_exception(InvalidRequest(why, "grammar"))
            else:
                self.compiled.set_result(None)
            while self._take():
                self._answer_all()
        except _Closed:
            if not self.compiled.done():
                self.compiled.set_exception(InvalidRequest("the model is not served any more", "model"))
        finally:
            self._lose()

    def _take(self) -> bool:
        """Take what has come, and wait for something to do; whether there is."""
        while not self._closed:
            try:
                item = self._inbox.get(block=not self._waiting)
            except queue.Empty:
                return True
            if isinstance(item, Question):
                self._waiting[item.number] = item
            elif item is not None:
                self._waiting.pop(item, None)
                if self._told.pop(item, None) is not None:
                    self._left.append(item)
        return False

    def _look(self) -> None:
        if self._closed:
            raise _Closed

    def _start(self) -> None:
        """The first process; tried out before, so that grammars that are refused hold up nothing."""
        with self._gates.trying:
            self._compile(trial=True)
            self._lose()
        with self._gates.compiling:
            self._compile(trial=False)

    def _compile(self, *, trial: bool) -> None:
        """Start a process. One that was ended by somebody, and not by its limits, is tried again."""
        for left in reversed(range(_TRIES)):
            self._look()
            self._channel, self.pid = self._fork(self._look)
            health = Health(self.pid)
            try:
                self._channel.send(msgspec.msgpack.encode(Start(self._grammar, trial)), self._look)
                compiled = msgspec.msgpack.decode(self._receive(health), type=Compiled)
            except OSError as error:
                self._lose()
                if left and (isinstance(error, Stalled) or health.used_s < COMPILE_CPU_S / 2):
                    continue
                if isinstance(error, Stalled):
                    raise QueueFull(f"the grammar could not be compiled: {error}", 1.0) from None
                limits = f"{COMPILE_CPU_S:g} seconds of CPU, {MEMORY_BYTES >> 20} MiB of memory or the stack"
                why = f"compiling it takes more than {limits}; simplify it"
                raise InvalidRequest(why, "grammar") from None
            if compiled.error is not None:
                self._lose()
                raise InvalidRequest(compiled.error, "grammar")
            return

    def _receive(self, health: Health) -> bytearray:
        assert self._channel is not None

        def look() -> None:
            self._look()
            health.look()

        return self._channel.receive(look)

    def _lose(self) -> None:
        """End the process, if there is one; another will know nothing."""
        if self._channel is not None:
            assert self.pid is not None
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._channel.close()
        self._channel = self.pid = None
        self._told.clear()
        self._left.clear()

    def _answer_all(self) -> None:
        """Answer what waits; where the process ends meanwhile, the questions wait for another."""
        questions = list(self._waiting.values())
        if self.compiled.exception() is not None:
            self._fail(questions, Failure(str(self.compiled.exception()), FinishReason.INVALID))
            return
        try:
            if self._channel is None:
                self._compile(trial=False)
            failures, masks = self._ask(questions)
        except TooSlow:
            self._lose()
            self._fail(questions, _TOO_SLOW)
        except (OSError, msgspec.MsgspecError, InvalidRequest, QueueFull):
            self._lose()
            self._deaths += 1
            if self._deaths == MOST_DEATHS:
                self._deaths = 0
                self._fail(questions, _LOST)
        else:
            self._deaths = 0
            for at, question in enumerate(questions):
                why = failures.get(at)
                if why is None:
                    question.answer(masks[at])
                else:
                    why = f"the grammar allows no further token: {why}"
                    question.answer(None, Failure(why, FinishReason.INVALID))
            self._done()

    def _ask(self, questions: Sequence[Question]) -> tuple[dict[int, str], np.ndarray]:
        """Ask the process: why some have no mask, by their place, and masks [len(questions), words]."""
        assert self._channel is not None
        assert self.pid is not None
        told = [
            Told(each.number, list(each.tokens[each.first + self._told.get(each.number, 0) : each.end]))
            for each in questions
        ]
        cpu_s = MASK_CPU_S * len(told) + TOLD_CPU_S * sum([len(each.tokens) for each in told])
        health = Health(self.pid, cpu_s)
        self._channel.send(msgspec.msgpack.encode(Step(told, self._left, cpu_s)), health.look)
        self._left.clear()
        self._told.update({each.number: each.end - each.first for each in questions})
        answer = msgspec.msgpack.decode(self._receive(health), type=Masked)
        masks = np.frombuffer(self._receive(health), dtype=np.uint32)
        return answer.failures, masks.reshape(len(questions), -1)

    def _fail(self, questions: Sequence[Question], failure: Failure) -> None:
        for question in questions:
            question.answer(None, failure)
        self._done()

    def _done(self) -> None:
        """All that waited is answered."""
        self._waiting.clear()
        with self._answered:
            self._answered.notify_all()
