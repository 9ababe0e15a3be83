"""The thread that steps the engine of a Shoal; those of all callers only wait for what they asked."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import TypeVar

from shoal.core import ConfigError, EngineDied
from shoal.engine.core import Engine
from shoal.frontend.offline_batch import OfflineBatch, RequestOutput

_log = logging.getLogger(__name__)

_POLL_S = 0.001
_LONGEST_WAIT_S = 3600.0
_CLOSED = "this Shoal is closed; make a new one to generate"
_CLOSED_MEANWHILE = "this Shoal was closed before the outputs were finished"

T = TypeVar("T")


class EngineThread:
    """Steps an engine for the batches of many threads and coroutines, which share its steps.

    Only its thread touches the engine. What callers want comes as messages, which are all taken between any
    two steps, so that nobody waits for the batch of another. Answers are given when no step is in flight, or
    others have work: a caller who is alone finds the engine at rest.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        engine.interrupted = lambda: not messages.empty()
        self._messages = messages  # garbage collection may put into it, so it takes no lock
        self._batches: dict[str, OfflineBatch] = {}  # by unfinished request
        self._answers: list[Callable[[], None]] = []
        self._broken: BaseException | None = None
        self._open = True  # for the thread
        self._closed = False  # for callers
        self._closing = threading.Lock()
        """Held while it is decided whether a message comes before the last one."""
        self._ended: Future[None] = Future()
        """Done when the engine is closed."""
        self._thread = threading.Thread(target=self._work, name="shoal-engine", daemon=True)
        self._thread.start()

    def require_open(self) -> None:
        """Raise ConfigError if this was closed."""
        if self._closed:
            raise ConfigError(_CLOSED)

    def submit(self, batch: OfflineBatch) -> None:
        """Run a batch, whose ``done`` then ends; raises ConfigError if this was closed."""
        with self._closing:
            self.require_open()
            self._messages.put(partial(self._submit, batch))

    def run(self, batch: OfflineBatch) -> list[RequestOutput]:
        """The outputs of a batch. Ctrl-C cancels it; a second one interrupts at once.

        Raises as ``Engine.submit``, EngineDied, and ConfigError if this was closed.
        """
        try:
            self.submit(batch)
            return batch.done.result()
        except KeyboardInterrupt:
            self.cancel(batch)
            wait([batch.done])
            raise

    def cancel(self, batch: OfflineBatch) -> None:
        """End what is unfinished of a batch, submitted or not; returns at once, and takes no lock."""
        self._messages.put(partial(self._end, batch, CancelledError()))

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question about the engine, asked between two steps."""
        answer: Future[T] = Future()
        with self._closing:
            closed = self._closed
            if not closed:
                self._messages.put(lambda: self._answers.append(partial(_reply, answer, question)))
        if closed:
            self._thread.join()
            return question()
        return answer.result()

    def close(self) -> None:
        """End all batches with a ConfigError, and close the engine; closing twice does nothing."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._messages.put(self._close)
        self._ended.result()

    def abandon(self) -> None:
        """End the thread, when nobody is left who could ask for something; the engine is not closed."""
        self._closed = True
        self._messages.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while self._open:
            self._take_messages()
            if self._engine.busy and self._broken is None:
                self._step()
            if self._batches or not self._engine.busy or self._broken is not None:
                self._reply()

    def _reply(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()

    def _take_messages(self) -> None:
        """Wait until there is something to do, and do all that was asked."""
        wait_s = self._wait_s()
        try:
            message = self._messages.get(block=wait_s != 0, timeout=wait_s)
            while True:
                message()
                message = self._messages.get_nowait()
        except Empty:
            return

    def _wait_s(self) -> float | None:
        """How long a step would do nothing, if no message comes; None: for ever."""
        if self._broken is not None or not self._engine.busy:
            return None
        if not self._engine.idle:
            return 0
        if self._engine.needs_polling:
            return _POLL_S
        until_ns = self._engine.idle_until_ns
        if until_ns is None:
            count = self._engine.unfinished
            self._fail(RuntimeError(f"{count} requests are unfinished, but the scheduler has nothing to do"))
            return 0
        return min(_LONGEST_WAIT_S, max(0, until_ns - self._engine.now_ns()) / 1e9)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except BaseException as error:
            self._fail(error)
            return
        started_ns = monotonic_ns()
        for event in events:
            batch = self._batches.get(event.request_id)
            if batch is None:
                continue
            try:
                batch.take(event)
            except Exception as error:  # its tokenizer's, or of who is told: nothing to others
                self._end(batch, error)
            if event.request_id not in batch.unfinished:
                self._batches.pop(event.request_id, None)
            if not batch.unfinished:
                self._finish(batch)
        self._engine.add_reply_time(monotonic_ns() - started_ns)

    def _submit(self, batch: OfflineBatch) -> None:
        try:
            if self._broken is not None:
                raise _died(self._broken)
            batch.submit()
        except Exception as error:
            self._end(batch, error)
            return
        self._batches |= dict.fromkeys(batch.unfinished, batch)
        if not batch.unfinished:
            self._finish(batch)

    def _finish(self, batch: OfflineBatch) -> None:
        """Answer with the outputs of a batch, unless it has ended otherwise."""
        self._answers.append(partial(_answer, batch, None))

    def _end(self, batch: OfflineBatch, error: BaseException) -> None:
        """Answer a batch with an error, unless it has ended."""
        for request_id in batch.unfinished:
            self._batches.pop(request_id, None)
        if self._broken is None:
            batch.cancel()
        self._answers.append(partial(_answer, batch, error))

    def _end_all(self, error: Callable[[], BaseException]) -> None:
        for batch in set(self._batches.values()):
            self._end(batch, error())  # one of its own: who raises it adds to its traceback

    def _fail(self, error: BaseException) -> None:
        """The engine can do no more: all who wait are told, and all who come."""
        _log.error("the engine ended with an error", exc_info=error)
        self._broken = error
        self._end_all(partial(_died, error))

    def _stop(self) -> None:
        self._end_all(partial(ConfigError, _CLOSED_MEANWHILE))
        self._reply()
        self._open = False

    def _close(self) -> None:
        """Let the steps in flight end, and release the engine."""
        self._end_all(partial(ConfigError, _CLOSED_MEANWHILE))
        try:
            while self._engine.busy and self._broken is None:
                self._engine.step()
        except Exception as error:
            self._fail(error)
        self._stop()
        try:
            self._engine.close()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine ended with an error ({type(error).__name__}: {error}); make a new Shoal")
    died.__cause__ = error
    return died


def _answer(batch: OfflineBatch, error: BaseException | None) -> None:
    if batch.done.done():
        return
    if error is None:
        batch.done.set_result(batch.outputs())
    else:
        batch.done.set_exception(error)


def _reply(answer: Future[T], question: Callable[[], T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
