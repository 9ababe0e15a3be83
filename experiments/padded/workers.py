"""Worker threads of a static engine, each with a queue of batches (SCLS, section 4.1)."""

import logging
import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from experiments.padded.executor import StaticExecutor, StaticResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchWork:
    """One batch for a worker: arguments of ``StaticExecutor.run``."""

    number: int
    """Identifies the batch in its ``BatchDone``."""
    prompts: Sequence[Sequence[int]]
    iterations: int
    limits: Sequence[int]
    ends: Sequence[Collection[int]]


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Result or failure of a batch."""

    worker: int
    number: int
    """That of its ``BatchWork``."""
    finished_ns: int
    """On the monotonic clock."""
    result: StaticResult | None = None
    """None if the worker failed."""
    error: str | None = None


class StaticWorkers:
    """Threads that serve batches; a context manager.

    executors: one for each worker. Leaving the context drops waiting batches and ends running ones after
    their current iteration.
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
        return len(self._executors)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        for executor, waiting in zip(self._executors, self._queues, strict=True):
            executor.interrupt()
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, worker: int, work: BatchWork) -> None:
        """Append a batch to a worker's queue."""
        self._queues[worker].put(work)

    def next_done(self, timeout_s: float | None) -> BatchDone | None:
        """The next finished batch; waits up to ``timeout_s`` (None: without limit), and then returns None."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _serve(self, worker: int) -> None:
        while (work := self._queues[worker].get()) is not None and not self._closing.is_set():
            result, error = None, None
            try:
                result = self._executors[worker].run(work.prompts, work.iterations, work.limits, work.ends)
            except Exception as problem:  # every failure must reach the requests of the batch
                _log.exception("worker %d failed on a batch of %d", worker, len(work.prompts))
                error = f"worker {worker} failed: {type(problem).__name__}: {problem}"
            self._done.put(BatchDone(worker, work.number, time.monotonic_ns(), result, error))
