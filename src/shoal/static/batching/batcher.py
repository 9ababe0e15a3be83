"""The global batcher: one pool of requests, several workers that serve one static batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core import InvalidRequest
from shoal.static.batching.estimates import MemoryLimit, ServingTime
from shoal.static.batching.forming import Forming
from shoal.static.batching.options import StaticOptions
from shoal.static.batching.types import Assignment, StaticBatch, StaticRequest


@dataclass(slots=True)
class _Worker:
    """What one worker has to do."""

    waiting: dict[str, StaticRequest] = field(default_factory=dict)
    """Requests that only this worker will serve, by id; empty where there is a common pool."""
    unfinished: dict[int, Assignment] = field(default_factory=dict)
    """Batches that it was given and has not finished, by number of the assignment."""
    load_s: float = 0.0
    """Estimated seconds of both."""
    completed_ns: int | None = None
    """When it last finished a batch."""

    def unload(self, seconds: float) -> None:
        """Take estimated work off; exactly nothing is left where nothing is to do."""
        busy = self.unfinished or self.waiting
        self.load_s = max(0.0, self.load_s - seconds) if busy else 0.0


class GlobalBatcher:
    """Forms batches of the waiting requests and assigns them to workers; no clock, no threads.

    Its caller submits requests, asks ``dispatch`` after every submission and every end of a batch and at
    ``next_ns``, has each worker serve its batches in the order in which it was given them, and reports each
    with ``finished``. A worker may hold a queue of batches.

    The interval begins when batches are formed. Requests that come into an empty pool after it has passed
    are batched at once.
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
        self._pool: dict[str, StaticRequest] = {}
        self._unfinished_ids: set[str] = set()
        self._due_ns = 0
        self._num_placed = 0
        self._num_assigned = 0
        self._predicted_sum, self._num_submitted = 0, 0
        self._slo_sum_s, self._num_with_slo = 0.0, 0
        self._pooled = options.interval.after_s([0.0] * workers) is not None

    @property
    def pending(self) -> int:
        """Requests that are in no batch."""
        return len(self._pool) + sum(len(worker.waiting) for worker in self._workers)

    @property
    def unfinished(self) -> int:
        """Requests submitted and not ended: pending, or in a batch that a worker has not finished."""
        return len(self._unfinished_ids)

    @property
    def loads(self) -> tuple[float, ...]:
        """Estimated seconds of unfinished work of every worker."""
        return tuple(worker.load_s for worker in self._workers)

    @property
    def completed_ns(self) -> tuple[int | None, ...]:
        """When every worker last finished a batch; None where it never has."""
        return tuple(worker.completed_ns for worker in self._workers)

    @property
    def next_ns(self) -> int | None:
        """When ``dispatch`` will have something to assign (the past: now); None: only after an event."""
        if self._pooled:
            return self._due_ns if self._pool else None
        ready = any(worker.waiting and not worker.unfinished for worker in self._workers)
        return 0 if ready else None

    def submit(self, request: StaticRequest) -> None:
        """Put a new request into the pool.

        Raises:
            InvalidRequest: even alone it needs more memory than there is.
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

    def withdraw(self, request_id: str) -> bool:
        """Forget a request that waits in no batch; False if it is in one (leave it out of ``finished``)."""
        if self._pool.pop(request_id, None) is not None:
            self._unfinished_ids.discard(request_id)
            return True
        for worker in self._workers:
            request = worker.waiting.pop(request_id, None)
            if request is not None:
                worker.unload(self._estimate_alone_s(request))
                self._unfinished_ids.discard(request_id)
                return True
        return False

    def dispatch(self, now_ns: int) -> list[Assignment]:
        """Form and assign batches if it is time to; in the order in which they were placed."""
        return self._dispatch_pool(now_ns) if self._pooled else self._dispatch_idle()

    def finished(self, assignment: Assignment, unfinished: Sequence[StaticRequest], now_ns: int) -> None:
        """A worker has finished a batch, or has failed at it.

        unfinished: those of its requests that must be served further, as they are now
        (``StaticRequest.after``). They return to the pool behind what waits there.

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

    def _enqueue(self, request: StaticRequest) -> None:
        if self._pooled:
            self._pool[request.id] = request
            return
        worker = self._workers[self._choose_worker()]
        worker.waiting[request.id] = request
        worker.load_s += self._estimate_alone_s(request)

    def _dispatch_pool(self, now_ns: int) -> list[Assignment]:
        if not self._pool or now_ns < self._due_ns:
            return []
        batches = self.options.former.form(list(self._pool.values()), self._forming())
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
            batch = self.options.former.form(list(worker.waiting.values()), self._forming())[0]
            for request in batch.requests:
                worker.unload(self._estimate_alone_s(worker.waiting.pop(request.id)))
            assignments.append(self._assign(worker_number, batch))
        return assignments

    def _choose_worker(self) -> int:
        chosen = self.options.offloader.choose(self.loads, self._num_placed)
        self._num_placed += 1
        return chosen

    def _assign(self, worker_number: int, batch: StaticBatch) -> Assignment:
        worker = self._workers[worker_number]
        assignment = Assignment(worker_number, batch, self._num_assigned)
        self._num_assigned += 1
        worker.unfinished[assignment.number] = assignment
        worker.load_s += batch.estimate_s
        return assignment

    def _estimate_alone_s(self, request: StaticRequest) -> float:
        return self._forming().batch([request]).estimate_s

    def _forming(self) -> Forming:
        options = self.options
        return Forming(
            time=self._time,
            memory=self._memory,
            slice_tokens=options.slice_tokens,
            max_batch=options.max_batch,
            trust_predictions=options.trust_predictions,
            mean_slo_s=self._slo_sum_s / self._num_with_slo if self._num_with_slo else 1.0,
            mean_predicted=self._predicted_sum / self._num_submitted if self._num_submitted else 1.0,
        )
