"""Builders for static batching: requests, estimates, and a run over fake workers on a virtual clock."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.padded.account import BatchAccount, account
from experiments.padded.batcher import Assignment, GlobalBatcher
from experiments.padded.options import StaticOptions
from shoal.batches import FormingContext, MemoryByBytes, MemoryLimit, PooledRequest, RequestBatch, ServingTime

ROOMY = MemoryByBytes(token_bytes=1, available_bytes=1 << 40, zeta=1.0)


def memory_of(tokens: int) -> MemoryByBytes:
    """Room for so many tokens."""
    return MemoryByBytes(token_bytes=1, available_bytes=tokens, zeta=1.0)


def make_request(
    number: int = 0,
    *,
    tokens: int = 10,
    remaining: int = 100,
    predicted: int | None = None,
    slo_s: float | None = None,
    arrival_ns: int = 0,
) -> PooledRequest:
    return PooledRequest(
        id=f"r{number}",
        tokens=tokens,
        remaining=remaining,
        predicted=remaining if predicted is None else predicted,
        slo_s=slo_s,
        arrival_ns=arrival_ns,
        number=number,
    )


def make_requests(*tokens: int, remaining: int = 100) -> list[PooledRequest]:
    return [make_request(number, tokens=length, remaining=remaining) for number, length in enumerate(tokens)]


@dataclass(frozen=True)
class Bilinear:
    """SCLS's forms of prefill and of one decode iteration, summed step by step, in seconds.

    The defaults give the two times of the paper's Fig. 11 (13.5 s together, 7.6 s apart).
    """

    prefill: tuple[float, float, float, float] = (1.5e-4, 0.0, 0.0, 0.0)
    decode: tuple[float, float, float, float] = (3.5e-6, 0.0, 0.0, 0.025)

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        total = self._form(self.prefill, sequences, input_tokens)
        steps = range(input_tokens + 1, input_tokens + iterations + 1)
        return total + sum(self._form(self.decode, sequences, cached) for cached in steps)

    @staticmethod
    def _form(weights: tuple[float, float, float, float], rows: int, length: int) -> float:
        a, b, c, d = weights
        return a * rows * length + b * rows + c * length + d


@dataclass(frozen=True)
class Swift:
    """Bilinear, but quick to compute: for whole runs."""

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        decode = iterations * (0.025 + 3.5e-6 * sequences * (input_tokens + iterations / 2))
        return decode + 1.5e-4 * sequences * input_tokens


def make_context(
    *,
    time: ServingTime | None = None,
    memory: MemoryLimit = ROOMY,
    slice_tokens: int | None = None,
    max_batch: int | None = None,
    trust_predictions: bool = False,
    mean_slo_s: float = 1.0,
    mean_predicted: float = 1.0,
) -> FormingContext:
    return FormingContext(
        time=Swift() if time is None else time,
        memory=memory,
        slice_tokens=slice_tokens,
        max_batch=max_batch,
        trust_predictions=trust_predictions,
        mean_slo_s=mean_slo_s,
        mean_predicted=mean_predicted,
    )


def ids(batches: Sequence[RequestBatch]) -> list[list[str]]:
    return [[request.id for request in batch.requests] for batch in batches]


def tokens_of(batches: Sequence[RequestBatch]) -> list[list[int]]:
    return [[request.tokens for request in batch.requests] for batch in batches]


@dataclass(frozen=True)
class Job:
    """A request of a run, when it comes, and how many tokens it really generates."""

    request: PooledRequest
    output: int


@dataclass
class Run:
    """What happened: every served batch in order of its end, every request's tokens and end."""

    served: list[tuple[Assignment, BatchAccount]] = field(default_factory=list)
    generated: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    loads_at_end: tuple[float, ...] = ()

    def total(self, name: str) -> int:
        return sum(getattr(spent, name) for _, spent in self.served)

    @property
    def mean_batch(self) -> float:
        return sum(len(assignment.batch) for assignment, _ in self.served) / len(self.served)


class FakeWorkers:
    """Drives a GlobalBatcher over workers that take exactly the time they run, on a virtual clock."""

    def __init__(
        self, options: StaticOptions, jobs: Sequence[Job], *, workers: int, memory: MemoryLimit = ROOMY
    ) -> None:
        self.time = Swift()
        self.batcher = GlobalBatcher(options, self.time, memory, workers=workers)
        self.coming = sorted(jobs, key=lambda job: job.request.arrival_ns)
        self.outputs = {job.request.id: job.output for job in jobs}
        self.queues: list[list[Assignment]] = [[] for _ in range(workers)]
        self.ends: list[int | None] = [None] * workers
        self.in_batch: set[str] = set()
        self.run = Run(generated=dict.fromkeys(self.outputs, 0))
        self.now = 0

    def to_the_end(self) -> Run:
        while self.coming or self.batcher.unfinished:
            self._advance()
            while self.coming and self.coming[0].request.arrival_ns <= self.now:
                self.batcher.submit(self.coming.pop(0).request)
            for worker, end in enumerate(self.ends):
                if end is not None and end <= self.now:
                    self._finish(worker)
            for assignment in self.batcher.dispatch(self.now):
                members = {request.id for request in assignment.batch.requests}
                assert not members & self.in_batch
                self.in_batch |= members
                self.queues[assignment.worker].append(assignment)
            for worker in range(len(self.queues)):
                self._start(worker)
        self.run.loads_at_end = self.batcher.loads
        return self.run

    def _advance(self) -> None:
        times = [end for end in self.ends if end is not None]
        times += [job.request.arrival_ns for job in self.coming[:1]]
        if self.batcher.next_ns is not None:
            times.append(self.batcher.next_ns)
        assert times, "requests are unfinished, but nothing will ever happen"
        self.now = max(self.now, min(times))

    def _iterations(self, batch: RequestBatch) -> tuple[list[int], int]:
        left = [self.outputs[request.id] - self.run.generated[request.id] for request in batch.requests]
        iterations = min(batch.iterations, max(left))
        return [min(tokens, iterations) for tokens in left], iterations

    def _start(self, worker: int) -> None:
        if self.ends[worker] is None and self.queues[worker]:
            batch = self.queues[worker][0].batch
            seconds = self.time.serve(len(batch), batch.input_tokens, self._iterations(batch)[1])
            self.ends[worker] = self.now + round(seconds * 1e9)

    def _finish(self, worker: int) -> None:
        assignment = self.queues[worker].pop(0)
        self.ends[worker] = None
        outputs, iterations = self._iterations(assignment.batch)
        self.run.served.append((assignment, account(assignment.batch, outputs, iterations)))
        unfinished = []
        for request, output in zip(assignment.batch.requests, outputs, strict=True):
            self.in_batch.discard(request.id)
            self.run.generated[request.id] += output
            if self.run.generated[request.id] == self.outputs[request.id]:
                self.run.ended.append(request.id)
            else:
                unfinished.append(request.after(output))
        self.batcher.finished(assignment, unfinished, self.now)


def random_jobs(seed: int, count: int, *, per_second: float, limit: int = 1024) -> list[Job]:
    """Long-tailed inputs and outputs, as in conversations, at random moments."""
    draw = random.Random(seed)
    jobs, now = [], 0.0
    for number in range(count):
        now += draw.expovariate(per_second)
        output = min(limit, 1 + int(draw.expovariate(1 / 150)))
        request = make_request(
            number,
            tokens=min(limit, 1 + int(draw.expovariate(1 / 200))),
            remaining=limit,
            predicted=min(limit, max(1, int(output * draw.uniform(0.7, 1.3)))),
            slo_s=draw.uniform(1, 350),
            arrival_ns=round(now * 1e9),
        )
        jobs.append(Job(request, output))
    return jobs
