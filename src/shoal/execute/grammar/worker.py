"""GrammarWorker: a thread that starts, queries and replaces the process that computes masks of one grammar.

Only this thread waits for the process. The process has no state beyond the output tokens it was sent, so a
replacement is sent all of them again.
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
from shoal.execute.grammar.channel import Channel, Poll
from shoal.execute.grammar.messages import (
    COMPILE_CPU_S,
    MEMORY_BYTES,
    Compiled,
    MaskReply,
    SequenceTokens,
    Start,
    Step,
)
from shoal.execute.grammar.watchdog import CpuTimeExceeded, ProcessStalled, Watchdog

_log = logging.getLogger(__name__)

Fork = Callable[[Poll], tuple[Channel, int]]
"""Starts a process; returns the channel to it, and its pid. Raises InvalidRequest if the model does not
support grammars, QueueFull if no process could be started."""

MASK_CPU_S = 0.1
"""CPU time limit for each mask."""
TOKEN_CPU_S = 0.001
"""CPU time limit for each output token that a process is sent."""
MAX_DEATHS = 3
"""After this many processes in a row end without a reply, the grammar counts as the cause."""
_TRIES = 2
_TOO_SLOW = Failure("the grammar takes too long: its next token could not be found in time; simplify it")
_LOST = Failure(f"the processes of the grammar have ended {MAX_DEATHS} times in a row; try again")


class MaskRequest:
    """A request for the mask of one sequence's next token; the result may be read when it is ``done``."""

    __slots__ = ("done", "end", "failure", "first", "mask", "number", "tokens", "worker")

    def __init__(
        self, number: int, tokens: Sequence[int], first: int, worker: "GrammarWorker | None"
    ) -> None:
        """tokens: of the sequence, with output from index ``first`` on; tokens appended later are ignored."""
        self.number = number
        self.tokens = tokens
        self.first = first
        self.end = len(tokens)
        self.worker = worker
        """Computes the mask; None if the grammar has no lease."""
        self.mask: np.ndarray | None = None
        """uint32 [words]: bit b of word w says whether token 32 * w + b is allowed."""
        self.failure: Failure | None = None
        self.done = False

    def finish(self, mask: np.ndarray | None, failure: Failure | None = None) -> None:
        self.mask, self.failure = mask, failure
        self.done = True


class CompileGates:
    """Limits how many grammars are compiled at the same time."""

    def __init__(self, max_trials: int) -> None:
        """max_trials: trial compilations at the lowest priority at the same time."""
        self.trials = threading.BoundedSemaphore(max_trials)
        """Held during trial compilations."""
        self.compiling = threading.Lock()
        """Held during the one compilation at the priority of masks."""


class _Closed(Exception):
    """The worker was closed."""


class GrammarWorker:
    """Computes masks of one grammar.

    answered: notified when mask requests are done.
    """

    def __init__(
        self, grammar: Grammar, fork: Fork, gates: CompileGates, answered: threading.Condition
    ) -> None:
        self.compiled: Future[None] = Future()
        """Done when the grammar is compiled. Raises InvalidRequest if it cannot be used, QueueFull if it
        could not be compiled for another reason."""
        self.num_leases = 0
        """Set by the pool."""
        self.pid: int | None = None
        self._grammar = grammar
        self._fork = fork
        self._gates = gates
        self._answered = answered
        self._inbox: queue.SimpleQueue[MaskRequest | int | None] = queue.SimpleQueue()
        self._closed = False
        self._channel: Channel | None = None
        self._waiting: dict[int, MaskRequest] = {}
        """Requests without a result, by sequence id."""
        self._sent: dict[int, int] = {}
        """Number of output tokens that the process was sent, by sequence id."""
        self._left: list[int] = []
        """Sequences that have left and that the process still remembers."""
        self._deaths = 0
        self._thread = threading.Thread(target=self._run, name="shoal-grammar", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the grammar could not be compiled."""
        return self.compiled.done() and self.compiled.exception() is not None

    def submit(self, request: MaskRequest) -> None:
        """Request a mask; returns at once."""
        self._inbox.put(request)

    def forget(self, number: int) -> None:
        """Forget a sequence that has left."""
        self._inbox.put(number)

    def close(self) -> None:
        """End the process; returns at once."""
        self._closed = True
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
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
            while self._receive_inbox():
                self._process_requests()
        except _Closed:
            if not self.compiled.done():
                self.compiled.set_exception(InvalidRequest("the model is not served any more", "model"))
        finally:
            self._kill_process()

    def _receive_inbox(self) -> bool:
        """Process the inbox and wait for work; returns False when the worker was closed."""
        while not self._closed:
            try:
                item = self._inbox.get(block=not self._waiting)
            except queue.Empty:
                return True
            if isinstance(item, MaskRequest):
                self._waiting[item.number] = item
            elif item is not None:
                self._waiting.pop(item, None)
                if self._sent.pop(item, None) is not None:
                    self._left.append(item)
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise _Closed

    def _start(self) -> None:
        """Start the first process, after a trial compilation, so that grammars that fail delay no others."""
        with self._gates.trials:
            self._compile(trial=True)
            self._kill_process()
        with self._gates.compiling:
            self._compile(trial=False)

    def _compile(self, *, trial: bool) -> None:
        """Start a process and compile the grammar; retried once if the process was ended by other than its
        limits."""
        for left in reversed(range(_TRIES)):
            self._check_open()
            self._channel, self.pid = self._fork(self._check_open)
            watchdog = Watchdog(self.pid)
            try:
                self._channel.send(msgspec.msgpack.encode(Start(self._grammar, trial)), self._check_open)
                compiled = msgspec.msgpack.decode(self._receive(watchdog), type=Compiled)
            except OSError as error:
                self._kill_process()
                if left and (isinstance(error, ProcessStalled) or watchdog.used_s < COMPILE_CPU_S / 2):
                    continue
                if isinstance(error, ProcessStalled):
                    raise QueueFull(f"the grammar could not be compiled: {error}", 1.0) from None
                limits = f"{COMPILE_CPU_S:g} seconds of CPU, {MEMORY_BYTES >> 20} MiB of memory or the stack"
                why = f"compiling it takes more than {limits}; simplify it"
                raise InvalidRequest(why, "grammar") from None
            if compiled.error is not None:
                self._kill_process()
                raise InvalidRequest(compiled.error, "grammar")
            return

    def _receive(self, watchdog: Watchdog) -> bytearray:
        assert self._channel is not None

        def poll() -> None:
            self._check_open()
            watchdog.check()

        return self._channel.receive(poll)

    def _kill_process(self) -> None:
        """Kill the process, if there is one, and forget what it was sent."""
        if self._channel is not None:
            assert self.pid is not None
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._channel.close()
        self._channel = self.pid = None
        self._sent.clear()
        self._left.clear()

    def _process_requests(self) -> None:
        """Process the waiting requests; if the process ends meanwhile, they stay for the next one."""
        requests = list(self._waiting.values())
        if self.compiled.exception() is not None:
            self._fail(requests, Failure(str(self.compiled.exception()), FinishReason.INVALID))
            return
        try:
            if self._channel is None:
                self._compile(trial=False)
            failures, masks = self._query(requests)
        except CpuTimeExceeded:
            self._kill_process()
            self._fail(requests, _TOO_SLOW)
        except (OSError, msgspec.MsgspecError, InvalidRequest, QueueFull):
            self._kill_process()
            self._deaths += 1
            if self._deaths == MAX_DEATHS:
                self._deaths = 0
                self._fail(requests, _LOST)
        else:
            self._deaths = 0
            for at, request in enumerate(requests):
                why = failures.get(at)
                if why is None:
                    request.finish(masks[at])
                else:
                    why = f"the grammar allows no further token: {why}"
                    request.finish(None, Failure(why, FinishReason.INVALID))
            self._done()

    def _query(self, requests: Sequence[MaskRequest]) -> tuple[dict[int, str], np.ndarray]:
        """Query the process; returns failures by index, and masks uint32 [len(requests), words]."""
        assert self._channel is not None
        assert self.pid is not None
        sequences = [
            SequenceTokens(
                each.number, list(each.tokens[each.first + self._sent.get(each.number, 0) : each.end])
            )
            for each in requests
        ]
        cpu_s = MASK_CPU_S * len(sequences) + TOKEN_CPU_S * sum([len(each.tokens) for each in sequences])
        watchdog = Watchdog(self.pid, cpu_s)
        self._channel.send(msgspec.msgpack.encode(Step(sequences, self._left, cpu_s)), watchdog.check)
        self._left.clear()
        self._sent.update({each.number: each.end - each.first for each in requests})
        answer = msgspec.msgpack.decode(self._receive(watchdog), type=MaskReply)
        masks = np.frombuffer(self._receive(watchdog), dtype=np.uint32)
        return answer.failures, masks.reshape(len(requests), -1)

    def _fail(self, requests: Sequence[MaskRequest], failure: Failure) -> None:
        for request in requests:
            request.finish(None, failure)
        self._done()

    def _done(self) -> None:
        """Clear the waiting requests and notify."""
        self._waiting.clear()
        with self._answered:
            self._answered.notify_all()
