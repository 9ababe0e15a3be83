"""EngineThread: the thread that steps the engine of a ``Shoal`` for the batches of all caller threads."""

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
_MAX_WAIT_S = 3600.0
_SIGNAL_S = 0.5
"""Ctrl-C is seen within this time."""
_CLOSED = "this Shoal is closed; make a new one to generate"
_CLOSED_DURING_CALL = "this Shoal was closed before the outputs were finished"

T = TypeVar("T")


class EngineThread:
    """Steps an engine for the batches of many threads and coroutines, which share its steps.

    Only its own thread uses the engine. Callers send messages, which are all handled between two steps, so no
    call waits for another one's batch. Replies are sent when no step is in flight, or other batches are
    unfinished: a single caller finds the engine idle after its call.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        engine.interrupted = lambda: not messages.empty()
        self._messages = messages  # finalizers may put into it, so it must be reentrant
        self._batches: dict[str, OfflineBatch] = {}  # by unfinished request
        self._replies: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._running = True  # for the thread
        self._closed = False  # for callers
        self._close_lock = threading.Lock()
        """Orders messages before or after the closing one."""
        self._engine_closed: Future[None] = Future()
        """Done when the engine is closed."""
        self._thread = threading.Thread(target=self._loop, name="shoal-engine", daemon=True)
        self._thread.start()

    def require_open(self) -> None:
        """Raise ConfigError after ``close``."""
        if self._closed:
            raise ConfigError(_CLOSED)

    def submit(self, batch: OfflineBatch) -> None:
        """Run a batch until its ``done`` is set; returns at once. Raises ConfigError after ``close``."""
        with self._close_lock:
            self.require_open()
            self._messages.put(partial(self._submit, batch))

    def run(self, batch: OfflineBatch) -> list[RequestOutput]:
        """Run a batch and return its outputs. Ctrl-C cancels it; a second one interrupts at once.

        Raises as ``Engine.submit``, EngineDied, and ConfigError after ``close``.
        """
        try:
            self.submit(batch)
            # A signal that comes just before a wait begins is seen when the wait ends.
            while not batch.done.done():
                wait([batch.done], _SIGNAL_S)
            return batch.done.result()
        except KeyboardInterrupt:
            self.cancel(batch)
            wait([batch.done])
            raise

    def cancel(self, batch: OfflineBatch) -> None:
        """Cancel the unfinished requests of a batch, submitted or not; returns at once, and takes no lock."""
        self._messages.put(partial(self._reply_error, batch, CancelledError()))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function of the engine between two steps, and return its result."""
        future: Future[T] = Future()
        with self._close_lock:
            closed = self._closed
            if not closed:
                self._messages.put(lambda: self._replies.append(partial(_run_into, future, function)))
        if closed:
            self._thread.join()
            return function()
        return future.result()

    def close(self) -> None:
        """End all batches with a ConfigError, and close the engine; closing twice does nothing."""
        with self._close_lock:
            if not self._closed:
                self._closed = True
                self._messages.put(self._close)
        self._engine_closed.result()

    def abandon(self) -> None:
        """End the thread without closing the engine, when there are no callers left."""
        self._closed = True
        self._messages.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while self._running:
            self._take_messages()
            if self._engine.busy and self._error is None:
                self._step()
            if self._batches or not self._engine.busy or self._error is not None:
                self._send_replies()

    def _send_replies(self) -> None:
        replies, self._replies = self._replies, []
        for reply in replies:
            reply()

    def _take_messages(self) -> None:
        """Wait until there is work, and handle all messages."""
        wait_s = self._wait_s()
        try:
            message = self._messages.get(block=wait_s != 0, timeout=wait_s)
            while True:
                message()
                message = self._messages.get_nowait()
        except Empty:
            return

    def _wait_s(self) -> float | None:
        """How long to wait for a message before the next step; None: without a limit."""
        if self._error is not None or not self._engine.busy:
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
        return min(_MAX_WAIT_S, max(0, until_ns - self._engine.now_ns()) / 1e9)

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
                batch.add_event(event)
            except Exception as error:  # of its tokenizer or callback: other batches go on
                self._reply_error(batch, error)
            if event.request_id not in batch.unfinished:
                self._batches.pop(event.request_id, None)
            if not batch.unfinished:
                self._reply_outputs(batch)
        self._engine.add_reply_time(monotonic_ns() - started_ns)

    def _submit(self, batch: OfflineBatch) -> None:
        try:
            if self._error is not None:
                raise _engine_died(self._error)
            batch.submit()
        except Exception as error:
            self._reply_error(batch, error)
            return
        self._batches |= dict.fromkeys(batch.unfinished, batch)
        if not batch.unfinished:
            self._reply_outputs(batch)

    def _reply_outputs(self, batch: OfflineBatch) -> None:
        """Queue the outputs of a batch as its result, unless it has one."""
        self._replies.append(partial(_set_result, batch, None))

    def _reply_error(self, batch: OfflineBatch, error: BaseException) -> None:
        """Cancel a batch, and queue an error as its result, unless it has one."""
        for request_id in batch.unfinished:
            self._batches.pop(request_id, None)
        if self._error is None:
            batch.cancel()
        self._replies.append(partial(_set_result, batch, error))

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        for batch in set(self._batches.values()):
            self._reply_error(batch, error())  # each its own error, as raising adds to the traceback

    def _fail(self, error: BaseException) -> None:
        """Fail all batches, now and later, as the engine has failed."""
        _log.error("the engine ended with an error", exc_info=error)
        self._error = error
        self._fail_all(partial(_engine_died, error))

    def _stop(self) -> None:
        self._fail_all(partial(ConfigError, _CLOSED_DURING_CALL))
        self._send_replies()
        self._running = False

    def _close(self) -> None:
        """Complete the steps in flight, and close the engine."""
        self._fail_all(partial(ConfigError, _CLOSED_DURING_CALL))
        try:
            while self._engine.busy and self._error is None:
                self._engine.step()
        except Exception as error:
            self._fail(error)
        self._stop()
        try:
            self._engine.close()
        except BaseException as error:
            self._engine_closed.set_exception(error)
        else:
            self._engine_closed.set_result(None)


def _engine_died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine ended with an error ({type(error).__name__}: {error}); make a new Shoal")
    died.__cause__ = error
    return died


def _set_result(batch: OfflineBatch, error: BaseException | None) -> None:
    if batch.done.done():
        return
    if error is None:
        batch.done.set_result(batch.outputs())
    else:
        batch.done.set_exception(error)


def _run_into(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
