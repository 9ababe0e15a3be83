"""Static engines of one process: each a thread with a queue of its own (SCLS, section 4.1)."""

import logging
import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shoal.static.serving.executor import StaticExecutor, StaticResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchWork:
    """One batch for one worker; all but ``number`` is for its executor (``StaticExecutor.run``)."""

    number: int
    """Identifies the batch in its ``BatchDone``."""
    prompts: Sequence[Sequence[int]]
    iterations: int
    limits: Sequence[int]
    ends: Sequence[Collection[int]]


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch that has been served, or at which its worker failed."""

    worker: int
    number: int
    """That of its ``BatchWork``."""
    finished_ns: int
    """On the monotonic clock."""
    result: StaticResult | None = None
    """None where the worker failed."""
    error: str | None = None
    """Why it failed."""


class StaticWorkers:
    """Threads that serve batches one after the other; used as a context.

    executors: one for each worker. Leaving the context drops the batches that wait and ends the running ones
    after the iteration they are in.
    """

    def __init__(self, executors: Sequence[StaticExecutor]) -> None:
        self._executors = list(executors)
        self._queues: list[queue.SimpleQueue[BatchWork | None]] = [queue.SimpleQueue() for _ in executors]
        self._done: queue.SimpleQueue[BatchDone] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"static-worker-{worker}", daemon=True)
            for worker in range(len(self._executors))
        ]

    def __len__(self) -> int:
        """How many workers there are."""
        return len(self._executors)

    def __enter__(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the threads and wait for them."""
        self._closing.set()
        for executor, waiting in zip(self._executors, self._queues, strict=True):
            executor.interrupt()
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def give(self, worker: int, work: BatchWork) -> None:
        """Put a batch at the end of a worker's queue."""
        self._queues[worker].put(work)

    def take(self, timeout_s: float | None) -> BatchDone | None:
        """The next batch that is done, waiting up to ``timeout_s`` (None: as long as it takes)."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _serve(self, worker: int) -> None:
        while (work := self._queues[worker].get()) is not None and not self._closing.is_set():
            result, error = None, None
            try:
                result = self._executors[worker].run(work.prompts, work.iterations, work.limits, work.ends)
            except Exception as problem:  # whatever it is, it must reach the requests of this batch
                _log.exception("worker %d failed on a batch of %d", worker, len(work.prompts))
                error = f"worker {worker} failed: {type(problem).__name__}: {problem}"
            self._done.put(BatchDone(worker, work.number, time.monotonic_ns(), result, error))
