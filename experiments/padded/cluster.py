"""Simulation of static batching: the real global batcher on a virtual clock, with simulated workers."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.padded.batch_time import BatchTime, ExactTime
from experiments.padded.batcher import Assignment, GlobalBatcher
from experiments.padded.executor import StaticResult
from experiments.padded.options import StaticOptions
from experiments.padded.report import StaticReport, StaticTally
from experiments.padded.simulated_request import SimulatedRequest, StaticLimits, rejected_row
from shoal.batches import MemoryLimit, ServingTime
from shoal.core import InvalidRequest, LengthPredictor, Request
from shoal.measure.records import RequestRow


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """One served batch; times are on the run's virtual clock."""

    assignment: Assignment
    start_ns: int
    end_ns: int
    iterations_run: int
    outputs: tuple[int, ...]
    """Generated tokens, in the order of the batch's requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRun:
    """Result of a simulated run; requests and batches are in order of their ends."""

    requests: tuple[RequestRow, ...]
    batches: tuple[BatchSpan, ...]
    report: StaticReport
    """As for a real run; its duration is from 0 to the last response."""


class StaticCluster:
    """Several simulated static engines of one model behind one pool of requests (SCLS, section 4.1).

    Works like ``StaticEngine``: at one instant, first batches end, then requests arrive, then batches are
    formed. A batch runs until all its requests have ended or its iterations are used up; unfinished requests
    return to the pool. Keeps no state between runs, except in a predictor that learns.

    estimate, memory: estimates by which batches are formed.
    time: actual durations; None: the estimate for the iterations that were run.
    predictor: predicts output lengths on arrival; None: every request is assumed to reach its limit.
    """

    def __init__(
        self,
        options: StaticOptions,
        limits: StaticLimits,
        *,
        workers: int,
        estimate: ServingTime,
        memory: MemoryLimit,
        time: BatchTime | None = None,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self.options = options
        self.limits = limits
        self.workers = workers
        self.estimate = estimate
        self.memory = memory
        self.time = ExactTime(estimate) if time is None else time
        self.predictor = predictor

    def run(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None
    ) -> StaticRun:
        """Serve each request, or refuse it on arrival if it cannot be served.

        requests: with ``true_output_tokens``. progress: called with the number of ended requests and the
        total. Raises ValueError for duplicate ids.
        """
        return _Run(self, requests, progress).serve()


class _Run:
    """The state of one run: clock, arrivals, and the batches of every worker."""

    def __init__(
        self,
        cluster: StaticCluster,
        requests: Sequence[Request],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        if len({request.id for request in requests}) < len(requests):
            raise ValueError("the requests of a run must have different ids")
        self._cluster = cluster
        self._total = len(requests)
        self._progress = progress
        numbered = enumerate(requests)
        self._arriving = deque(sorted(numbered, key=lambda pair: pair[1].arrival_ns))
        self._batcher = GlobalBatcher(
            cluster.options, cluster.estimate, cluster.memory, workers=cluster.workers
        )
        self._unfinished: dict[str, SimulatedRequest] = {}
        self._running: list[tuple[int, int, BatchSpan]] = []
        self._queued: list[deque[Assignment]] = [deque() for _ in range(cluster.workers)]
        self._busy = [False] * cluster.workers
        self._tally = StaticTally()
        self._slices: Counter[int] = Counter()
        self._rows: list[RequestRow] = []
        self._batches: list[BatchSpan] = []
        self._now_ns = 0

    def serve(self) -> StaticRun:
        while len(self._rows) < self._total:
            self._now_ns = self._next_ns()
            self._end_batches()
            self._arrive()
            for assignment in self._batcher.dispatch(self._now_ns):
                self._queued[assignment.worker].append(assignment)
            for worker in range(self._cluster.workers):
                self._start(worker)
        answered = [row for row in self._rows if row.answered]
        report = self._tally.report(
            answered,
            failed=len(self._rows) - len(answered),
            slices=self._slices,
            completed_ns=self._batcher.completed_ns,
            duration_ns=self._now_ns,
        )
        return StaticRun(requests=tuple(self._rows), batches=tuple(self._batches), report=report)

    def _next_ns(self) -> int:
        """Time of the next event: the end of a batch, an arrival, or the formation of batches."""
        due = [self._running[0][0]] if self._running else []
        if self._arriving:
            due.append(self._arriving[0][1].arrival_ns)
        if self._batcher.next_ns is not None:
            due.append(self._batcher.next_ns)
        if not due:
            raise RuntimeError(f"{len(self._unfinished)} requests are unfinished, but there is nothing to do")
        return max(self._now_ns, min(due))

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0][1].arrival_ns <= self._now_ns:
            number, request = self._arriving.popleft()
            try:
                simulated = SimulatedRequest.open(
                    request, number, self._cluster.limits, self._cluster.predictor
                )
                self._batcher.submit(simulated.static_request)
            except InvalidRequest as error:
                self._slices[0] += 1
                self._close(rejected_row(request, str(error)))
            else:
                self._unfinished[request.id] = simulated

    def _start(self, worker: int) -> None:
        """Start the next batch in the queue of an idle worker."""
        if self._busy[worker] or not self._queued[worker]:
            return
        assignment = self._queued[worker].popleft()
        batch = assignment.batch
        remaining = [self._unfinished[request.id].remaining for request in batch.requests]
        iterations_run = min(max(remaining), batch.iterations)
        seconds = self._cluster.time.duration_s(assignment, iterations_run)
        end_ns = self._now_ns + max(1, round(seconds * 1e9))
        outputs = tuple(min(tokens, iterations_run) for tokens in remaining)
        span = BatchSpan(assignment, self._now_ns, end_ns, iterations_run, outputs)
        self._busy[worker] = True
        heapq.heappush(self._running, (end_ns, assignment.number, span))

    def _end_batches(self) -> None:
        while self._running and self._running[0][0] <= self._now_ns:
            self._end(heapq.heappop(self._running)[2])

    def _end(self, span: BatchSpan) -> None:
        assignment = span.assignment
        self._busy[assignment.worker] = False
        self._batches.append(span)
        # Tokens are only counted, so there are no token ids.
        result = StaticResult([], [], span.iterations_run, span.end_ns - span.start_ns)
        self._tally.add(assignment.batch, result, span.outputs)
        unfinished = []
        for static_request, output in zip(assignment.batch.requests, span.outputs, strict=True):
            request = self._unfinished[static_request.id]
            if request.add_batch(output, span.end_ns, self._cluster.predictor):
                self._slices[request.batches] += 1
                self._close(request.row(assignment.worker))
                del self._unfinished[static_request.id]
            else:
                unfinished.append(request.static_request)
        self._batcher.finished(assignment, unfinished, span.end_ns)

    def _close(self, row: RequestRow) -> None:
        self._rows.append(row)
        if self._progress is not None:
            self._progress(len(self._rows), self._total)
