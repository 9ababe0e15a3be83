"""Static batches driven in this process: one global batcher, and workers that serve what it deals."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.core import InvalidRequest, LengthPredictor, Request, Service, resolve_slo
from shoal.engine.batch import Completion
from shoal.engine.detokenize import Decoder
from shoal.engine.info import EngineInfo
from shoal.engine.progress import TokenProgress
from shoal.engine.validation import check_request
from shoal.static.batching import Assignment, GlobalBatcher, MemoryLimit, ServingTime, StaticOptions
from shoal.static.serving.executor import StaticExecutor
from shoal.static.serving.open_request import OpenRequest, check_static_sampling
from shoal.static.serving.report import StaticReport, StaticTally
from shoal.static.serving.workers import BatchDone, BatchWork, StaticWorkers


@dataclass(frozen=True, slots=True)
class StaticOutcome:
    """What became of a run: an answer for each request, in their order, and what they cost together."""

    completions: list[Completion]
    report: StaticReport


class StaticEngine:
    """Several static engines of one model behind one pool of requests (SCLS, section 4.1).

    make_executor: called once for each worker of a run. time, memory: the estimates that batches are formed
    by. info: limits that requests are checked against. predictor: beliefs about output lengths; None believes
    that every request takes all that it may.
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
        """Answer requests, each exactly once; returns when all are.

        requests: with token ids; ``arrival_ns`` counts from the beginning of the run. Greedy only.
        progress: a bar on standard error, if that is a terminal. What a worker fails at is answered with
        FinishReason.ERROR and the reason. Raises InvalidRequest before anything runs if one cannot be served
        as asked. Ctrl-C ends the running batches and raises KeyboardInterrupt.
        """
        opened = [self._open(request, number, decoder) for number, request in enumerate(requests)]
        batcher = GlobalBatcher(self._options, self._time, self._memory, workers=self._workers)
        executors = [self._make_executor() for _ in range(self._workers)]
        with TokenProgress(len(opened), shown=progress) as bar, StaticWorkers(executors) as workers:
            return _Run(opened, batcher, workers, bar, self._predictor).answer()

    def _open(self, request: Request, number: int, decoder: Decoder) -> OpenRequest:
        """Check a request and open it; raises InvalidRequest."""
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
            limit=room if sampling.max_tokens is None else sampling.max_tokens,
            eos_token_ids=limits.eos_token_ids,
            decoder=decoder,
            predictor=self._predictor,
            slo_s=slo.e2e_s,
        )


def largest_total(memory: MemoryLimit, context_tokens: int) -> int:
    """Most tokens, prompt and output together, that one request alone can have; 0 where none fit."""
    totals = range(2, context_tokens + 1)
    fitting = bisect_left(totals, True, key=lambda total: not memory.fits(1, total - 1, 1))
    return totals[fitting - 1] if fitting else 0


class _Run:
    """One run: arrivals into the batcher, its batches to workers, their results back. Owns all its state."""

    def __init__(
        self,
        requests: Sequence[OpenRequest],
        batcher: GlobalBatcher,
        workers: StaticWorkers,
        bar: TokenProgress,
        predictor: LengthPredictor | None,
    ) -> None:
        self._requests = requests
        self._open = {one.request.id: one for one in requests}
        if len(self._open) < len(requests):
            raise ValueError("the requests of a run must have different ids")
        self._arriving = deque(sorted(requests, key=lambda one: one.request.arrival_ns))
        self._batcher = batcher
        self._workers = workers
        self._bar = bar
        self._predictor = predictor
        self._given: dict[int, Assignment] = {}
        self._tally = StaticTally()
        self._start_ns = time.monotonic_ns()

    def answer(self) -> StaticOutcome:
        """Until every request is answered."""
        while self._open:
            self._arrive()
            for assignment in self._batcher.dispatch(self._now_ns()):
                self._give(assignment)
            done = self._workers.take(self._wait_s())
            while done is not None:
                self._finish(done)
                done = self._workers.take(0)
        duration_ns = self._now_ns()
        completions = [one.completion for one in self._requests if one.completion is not None]
        records = [one.record for one in completions if one.record is not None]
        report = self._tally.report(
            records,
            failed=len(completions) - len(records),
            slices=Counter(one.batches for one in self._requests),
            completed_ns=self._batcher.completed_ns,
            duration_ns=duration_ns,
        )
        return StaticOutcome(completions, report)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    def _arrive(self) -> None:
        now_ns = self._now_ns()
        while self._arriving and self._arriving[0].request.arrival_ns <= now_ns:
            self._batcher.submit(self._arriving.popleft().place)

    def _wait_s(self) -> float | None:
        """How long to wait for a worker: until something else is due; None: nothing else is."""
        due = [self._arriving[0].request.arrival_ns] if self._arriving else []
        if self._batcher.next_ns is not None:
            due.append(self._batcher.next_ns)
        if due:
            return max(0, min(due) - self._now_ns()) / 1e9
        if not self._given:
            raise RuntimeError(
                f"{len(self._open)} requests are unfinished, but the batcher has nothing to do"
            )
        return None

    def _give(self, assignment: Assignment) -> None:
        batch = assignment.batch
        members = [self._open[one.id] for one in batch.requests]
        self._given[assignment.number] = assignment
        work = BatchWork(
            number=assignment.number,
            prompts=[one.known for one in members],
            iterations=batch.iterations,
            limits=[one.remaining for one in batch.requests],
            ends=[one.ends for one in members],
        )
        self._workers.give(assignment.worker, work)

    def _finish(self, done: BatchDone) -> None:
        assignment = self._given.pop(done.number)
        now_ns = done.finished_ns - self._start_ns
        members = [self._open[one.id] for one in assignment.batch.requests]
        tokens = 0
        if done.result is None:
            for one in members:
                one.fail(done.error or "the worker gave no reason")
        else:
            result = done.result
            used = [
                one.take(output, ended, now_ns, self._predictor)
                for one, output, ended in zip(members, result.outputs, result.ended, strict=True)
            ]
            self._tally.add(assignment.batch, result, used)
            tokens = sum(used)
        back = [one.place for one in members if one.completion is None]
        self._batcher.finished(assignment, back, now_ns)
        for one in members:
            if one.completion is not None:
                del self._open[one.request.id]
        self._bar.advance(len(members) - len(back), tokens)
