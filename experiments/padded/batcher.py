"""The global batcher: forms static batches from one pool of requests and assigns them to workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.padded.options import StaticOptions
from shoal.batches.estimates import MemoryLimit, ServingTime
from shoal.batches.forming import FormingContext
from shoal.batches.requests import PooledRequest, RequestBatch
from shoal.core import InvalidRequest


@dataclass(frozen=True, slots=True)
class Assignment:
    """A batch for a worker, which serves its assignments in order."""

    worker: int
    """Counted from 0."""
    batch: RequestBatch
    number: int = 0
    """Unique in one batcher."""


@dataclass(slots=True)
class _Worker:
    """The work of one worker."""

    waiting: dict[str, PooledRequest] = field(default_factory=dict)
    """Waiting requests of this worker, by id; empty with a common pool."""
    unfinished: dict[int, Assignment] = field(default_factory=dict)
    """Assigned batches that it has not finished, by number of the assignment."""
    load_s: float = 0.0
    """Estimated time of both."""
    completed_ns: int | None = None
    """When it last finished a batch."""

    def unload(self, seconds: float) -> None:
        """Subtract estimated work; without work the load is exactly 0."""
        busy = self.unfinished or self.waiting
        self.load_s = max(0.0, self.load_s - seconds) if busy else 0.0


class GlobalBatcher:
    """Forms batches of waiting requests and assigns them to workers; has no clock and no threads.

    The caller submits requests, and calls ``dispatch`` after every submission, after every end of a batch,
    and at ``next_ns``. Each worker serves its assigned batches in order, and the caller reports each with
    ``finished``. A worker may have a queue of batches.

    The interval begins when batches are formed. Requests that arrive in an empty pool after the interval are
    batched at once.
    """

    def __init__(
        self, options: StaticOptions, time: ServingTime, memory: MemoryLimit, *, workers: int
    ) -> None:
        if workers < 1:
            raise ValueError(f"static batches need at least one worker, got {workers}")
        self.options = options
        self._time = time
        self._memory = memory
        self._workers = [_Worker() for _ in range(workers)]
        self._pool: dict[str, PooledRequest] = {}
        self._unfinished_ids: set[str] = set()
        self._due_ns = 0
        self._num_placed = 0
        self._num_assigned = 0
        self._predicted_sum, self._num_submitted = 0, 0
        self._slo_sum_s, self._num_with_slo = 0.0, 0
        self._pooled = options.interval.after_s([0.0] * workers) is not None

    @property
    def pending(self) -> int:
        """Number of requests that are not in a batch."""
        return len(self._pool) + sum(len(worker.waiting) for worker in self._workers)

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended: pending, or in an unfinished batch."""
        return len(self._unfinished_ids)

    @property
    def loads(self) -> tuple[float, ...]:
        """Estimated seconds of unfinished work, by worker."""
        return tuple(worker.load_s for worker in self._workers)

    @property
    def completed_ns(self) -> tuple[int | None, ...]:
        """Time of the last finished batch, by worker; None if there is none."""
        return tuple(worker.completed_ns for worker in self._workers)

    @property
    def next_ns(self) -> int | None:
        """When ``dispatch`` will assign batches (a past time means now); None: only after another event."""
        if self._pooled:
            return self._due_ns if self._pool else None
        ready = any(worker.waiting and not worker.unfinished for worker in self._workers)
        return 0 if ready else None

    def submit(self, request: PooledRequest) -> None:
        """Put a new request into the pool.

        Raises:
            InvalidRequest: the request alone needs more memory than there is.
            ValueError: a request with this id is unfinished.
        """
        if request.id in self._unfinished_ids:
            raise ValueError(f"request {request.id!r} is unfinished already")
        if not self._memory.fits(1, request.tokens, request.remaining):
            raise InvalidRequest(
                f"{request.tokens} input and up to {request.remaining} output tokens do not fit in the "
                "memory of a worker even alone; ask for fewer (max_tokens) or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._unfinished_ids.add(request.id)
        self._num_submitted += 1
        self._predicted_sum += request.predicted
        if request.slo_s is not None:
            self._num_with_slo += 1
            self._slo_sum_s += request.slo_s
        self._enqueue(request)

    def remove(self, request_id: str) -> bool:
        """Remove a pending request; False if it is already in a batch (then leave it out of ``finished``)."""
        if self._pool.pop(request_id, None) is not None:
            self._unfinished_ids.discard(request_id)
            return True
        for worker in self._workers:
            request = worker.waiting.pop(request_id, None)
            if request is not None:
                worker.unload(self._single_estimate_s(request))
                self._unfinished_ids.discard(request_id)
                return True
        return False

    def dispatch(self, now_ns: int) -> list[Assignment]:
        """Form and assign batches if they are due; returns assignments in the order of placement."""
        return self._dispatch_pool(now_ns) if self._pooled else self._dispatch_idle()

    def finished(self, assignment: Assignment, unfinished: Sequence[PooledRequest], now_ns: int) -> None:
        """Report that a worker has finished a batch, or has failed.

        unfinished: the new values (``PooledRequest.after``) of its requests that have not ended. They return
        to the end of the pool.

        Raises:
            ValueError: the assignment is not unfinished, or a request was not in its batch.
        """
        worker = self._workers[assignment.worker]
        batch_ids = {request.id for request in assignment.batch.requests}
        unfinished_ids = [request.id for request in unfinished]
        if len(set(unfinished_ids)) != len(unfinished_ids) or not batch_ids.issuperset(unfinished_ids):
            raise ValueError(
                f"requests {unfinished_ids} are not distinct members of batch {sorted(batch_ids)}"
            )
        if worker.unfinished.pop(assignment.number, None) is None:
            raise ValueError(f"worker {assignment.worker} has no unfinished assignment {assignment.number}")
        worker.completed_ns = now_ns
        worker.unload(assignment.batch.estimate_s)
        self._unfinished_ids -= batch_ids.difference(unfinished_ids)
        for request in unfinished:
            self._enqueue(request)

    def _enqueue(self, request: PooledRequest) -> None:
        if self._pooled:
            self._pool[request.id] = request
            return
        worker = self._workers[self._choose_worker()]
        worker.waiting[request.id] = request
        worker.load_s += self._single_estimate_s(request)

    def _dispatch_pool(self, now_ns: int) -> list[Assignment]:
        if not self._pool or now_ns < self._due_ns:
            return []
        batches = self.options.former.form(list(self._pool.values()), self._context())
        self._pool.clear()
        assignments = [
            self._assign(self._choose_worker(), batch) for batch in self.options.offloader.order(batches)
        ]
        interval_s = self.options.interval.after_s(self.loads) or 0.0
        self._due_ns = now_ns + round(interval_s * 1e9)
        return assignments

    def _dispatch_idle(self) -> list[Assignment]:
        assignments = []
        for worker_number, worker in enumerate(self._workers):
            if worker.unfinished or not worker.waiting:
                continue
            batch = self.options.former.form(list(worker.waiting.values()), self._context())[0]
            for request in batch.requests:
                worker.unload(self._single_estimate_s(worker.waiting.pop(request.id)))
            assignments.append(self._assign(worker_number, batch))
        return assignments

    def _choose_worker(self) -> int:
        chosen = self.options.offloader.choose(self.loads, self._num_placed)
        self._num_placed += 1
        return chosen

    def _assign(self, worker_number: int, batch: RequestBatch) -> Assignment:
        worker = self._workers[worker_number]
        assignment = Assignment(worker_number, batch, self._num_assigned)
        self._num_assigned += 1
        worker.unfinished[assignment.number] = assignment
        worker.load_s += batch.estimate_s
        return assignment

    def _single_estimate_s(self, request: PooledRequest) -> float:
        return self._context().batch([request]).estimate_s

    def _context(self) -> FormingContext:
        options = self.options
        return FormingContext(
            time=self._time,
            memory=self._memory,
            slice_tokens=options.slice_tokens,
            max_batch=options.max_batch,
            trust_predictions=options.trust_predictions,
            mean_slo_s=self._slo_sum_s / self._num_with_slo if self._num_with_slo else 1.0,
            mean_predicted=self._predicted_sum / self._num_submitted if self._num_submitted else 1.0,
        )
