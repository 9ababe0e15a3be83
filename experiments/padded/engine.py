"""The static engine: a global batcher and worker threads that serve requests in this process."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.padded.batcher import Assignment, GlobalBatcher
from experiments.padded.executor import StaticExecutor
from experiments.padded.open_request import OpenRequest, check_static_sampling
from experiments.padded.options import StaticOptions
from experiments.padded.report import StaticReport, StaticTally
from experiments.padded.workers import BatchDone, BatchWork, StaticWorkers
from shoal.batches import MemoryLimit, ServingTime
from shoal.core import InvalidRequest, LengthPredictor, Request, Service, resolve_slo
from shoal.engine.info import EngineInfo
from shoal.frontend.detokenize import Decoder
from shoal.frontend.offline_batch import Completion
from shoal.frontend.progress import TokenProgress
from shoal.frontend.validation import check_request


@dataclass(frozen=True, slots=True)
class StaticOutcome:
    """Result of a run."""

    completions: list[Completion]
    """One for each request, in their order."""
    report: StaticReport


class StaticEngine:
    """Several static engines of one model behind one pool of requests (SCLS, section 4.1).

    make_executor: called once for each worker of a run.
    info: limits of requests.
    time, memory: estimates by which batches are formed.
    predictor: predicts output lengths; None: every request is assumed to reach its limit.
    """

    def __init__(
        self,
        service: Service,
        options: StaticOptions,
        make_executor: Callable[[], StaticExecutor],
        info: EngineInfo,
        *,
        workers: int,
        time: ServingTime,
        memory: MemoryLimit,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self.info = info
        self._service = service
        self._options = options
        self._make_executor = make_executor
        self._workers = workers
        self._time = time
        self._memory = memory
        self._predictor = predictor

    def run(self, requests: Sequence[Request], decoder: Decoder, *, progress: bool = True) -> StaticOutcome:
        """Serve all requests; returns when every one has ended.

        requests: with token ids and greedy sampling; ``arrival_ns`` counts from the start of the run.
        progress: a bar on standard error, if that is a terminal. Requests of a batch whose worker fails end
        with FinishReason.ERROR. Raises InvalidRequest for a request that cannot be served, before anything
        runs. Ctrl-C ends the running batches and raises KeyboardInterrupt.
        """
        open_requests = [self._open(request, number, decoder) for number, request in enumerate(requests)]
        batcher = GlobalBatcher(self._options, self._time, self._memory, workers=self._workers)
        executors = [self._make_executor() for _ in range(self._workers)]
        with TokenProgress(len(open_requests), shown=progress) as bar, StaticWorkers(executors) as workers:
            return _Run(open_requests, batcher, workers, bar, self._predictor).serve()

    def _open(self, request: Request, number: int, decoder: Decoder) -> OpenRequest:
        """Check a request; raises InvalidRequest."""
        prompt = request.prompt
        if not isinstance(prompt, Sequence):
            raise InvalidRequest("static batches need prompts of token ids, not of a length only", "prompt")
        sampling = request.sampling
        check_request(self.info, request.service, prompt, sampling, request.slo)
        check_static_sampling(sampling)
        limits = self.info.services[request.service]
        room = limits.max_total_tokens - len(prompt)
        slo = resolve_slo(request.slo, self._service.slo, self._service.execution_s)
        return OpenRequest.open(
            request,
            number,
            max_new_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            eos_token_ids=limits.eos_token_ids,
            decoder=decoder,
            predictor=self._predictor,
            slo_s=slo.e2e_s,
        )


def max_request_tokens(memory: MemoryLimit, context_tokens: int) -> int:
    """Maximum tokens, prompt and output, of one request in an otherwise empty memory; 0 if none fits."""
    totals = range(2, context_tokens + 1)
    fitting = bisect_left(totals, True, key=lambda total: not memory.fits(1, total - 1, 1))
    return totals[fitting - 1] if fitting else 0


class _Run:
    """The state of one run: passes arrivals to the batcher, batches to workers, and results back."""

    def __init__(
        self,
        requests: Sequence[OpenRequest],
        batcher: GlobalBatcher,
        workers: StaticWorkers,
        bar: TokenProgress,
        predictor: LengthPredictor | None,
    ) -> None:
        self._requests = requests
        self._unfinished = {opened.request.id: opened for opened in requests}
        if len(self._unfinished) < len(requests):
            raise ValueError("the requests of a run must have different ids")
        self._arriving = deque(sorted(requests, key=lambda opened: opened.request.arrival_ns))
        self._batcher = batcher
        self._workers = workers
        self._bar = bar
        self._predictor = predictor
        self._in_flight: dict[int, Assignment] = {}
        self._tally = StaticTally()
        self._start_ns = time.monotonic_ns()

    def serve(self) -> StaticOutcome:
        while self._unfinished:
            self._arrive()
            for assignment in self._batcher.dispatch(self._now_ns()):
                self._start(assignment)
            done = self._workers.next_done(self._wait_s())
            while done is not None:
                self._finish(done)
                done = self._workers.next_done(0)
        duration_ns = self._now_ns()
        completions = [request.completion for request in self._requests if request.completion is not None]
        records = [completion.record for completion in completions if completion.record is not None]
        report = self._tally.report(
            records,
            failed=len(completions) - len(records),
            slices=Counter(request.batches for request in self._requests),
            completed_ns=self._batcher.completed_ns,
            duration_ns=duration_ns,
        )
        return StaticOutcome(completions, report)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    def _arrive(self) -> None:
        now_ns = self._now_ns()
        while self._arriving and self._arriving[0].request.arrival_ns <= now_ns:
            self._batcher.submit(self._arriving.popleft().static_request)

    def _wait_s(self) -> float | None:
        """How long to wait for a worker: until another event is due; None: without limit."""
        due = [self._arriving[0].request.arrival_ns] if self._arriving else []
        if self._batcher.next_ns is not None:
            due.append(self._batcher.next_ns)
        if due:
            return max(0, min(due) - self._now_ns()) / 1e9
        if not self._in_flight:
            raise RuntimeError(
                f"{len(self._unfinished)} requests are unfinished, but the batcher has nothing to do"
            )
        return None

    def _start(self, assignment: Assignment) -> None:
        batch = assignment.batch
        open_requests = [self._unfinished[request.id] for request in batch.requests]
        self._in_flight[assignment.number] = assignment
        work = BatchWork(
            number=assignment.number,
            prompts=[request.input_ids for request in open_requests],
            iterations=batch.iterations,
            limits=[request.remaining for request in batch.requests],
            ends=[request.ends for request in open_requests],
        )
        self._workers.submit(assignment.worker, work)

    def _finish(self, done: BatchDone) -> None:
        assignment = self._in_flight.pop(done.number)
        now_ns = done.finished_ns - self._start_ns
        open_requests = [self._unfinished[request.id] for request in assignment.batch.requests]
        tokens = 0
        if done.result is None:
            for request in open_requests:
                request.fail(done.error or "the worker gave no reason")
        else:
            result = done.result
            used = [
                request.add_batch(output, ended, now_ns, self._predictor)
                for request, output, ended in zip(open_requests, result.outputs, result.ended, strict=True)
            ]
            self._tally.add(assignment.batch, result, used)
            tokens = sum(used)
        unfinished = [request.static_request for request in open_requests if request.completion is None]
        self._batcher.finished(assignment, unfinished, now_ns)
        for static_request, request in zip(assignment.batch.requests, open_requests, strict=True):
            if request.completion is not None:
                del self._unfinished[static_request.id]
        self._bar.advance(len(open_requests) - len(unfinished), tokens)
