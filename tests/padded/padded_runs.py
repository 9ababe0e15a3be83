"""Builders for simulated static batches, and the real in-process driver on a virtual clock."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from experiments.padded import engine as driver
from experiments.padded.batcher import GlobalBatcher
from experiments.padded.cluster import StaticCluster
from experiments.padded.engine import StaticEngine, StaticOutcome
from experiments.padded.executor import StaticResult
from experiments.padded.interval import AdaptiveInterval, FixedInterval
from experiments.padded.options import StaticOptions
from experiments.padded.presets import static_preset
from experiments.padded.simulated_request import StaticLimits
from experiments.padded.workers import BatchDone, BatchWork
from shoal.batches import MemoryByBytes, RequestBatch
from shoal.core import Request, SamplingParams, Service, SyntheticPrompt, uniform
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.forecast import Bilinear, PaddedLatency

CONTEXT = 120
EOS = 299
TIME = PaddedLatency(
    prefill=Bilinear(product=1e-4, sequence=1e-3, length=1e-4, constant=0.01),
    decode=Bilinear(product=1e-5, sequence=1e-4, length=1e-6, constant=0.02),
)
MEMORY = MemoryByBytes(token_bytes=1, available_bytes=1500, zeta=1.0)


def make_request(
    number: int, prompt: int = 5, output: int = 4, limit: int = 20, arrival_ms: int = 0
) -> Request:
    """A request that will end after ``output`` tokens, or at its limit."""
    return Request(
        id=f"r{number}",
        service="chat",
        prompt=SyntheticPrompt(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=limit),
        arrival_ns=arrival_ms * 10**6,
        true_output_tokens=output,
    )


def options_of(preset: str, slice_tokens: int = 4) -> StaticOptions:
    """A preset with intervals and slices for small requests."""
    options = static_preset(preset)
    interval = options.interval
    if isinstance(interval, FixedInterval):
        interval = FixedInterval(0.3)
    elif isinstance(interval, AdaptiveInterval):
        interval = AdaptiveInterval(0.3)
    cut = slice_tokens if options.slice_tokens else None
    return replace(options, interval=interval, slice_tokens=cut, max_batch=options.max_batch and 4)


def make_cluster(preset: str = "scls", workers: int = 2, slice_tokens: int = 4, **others) -> StaticCluster:
    settings = {"estimate": TIME, "memory": MEMORY} | others
    return StaticCluster(
        options_of(preset, slice_tokens), StaticLimits(context_tokens=CONTEXT), workers=workers, **settings
    )


class ByteDecoder:
    """Tokens are bytes."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < 256).decode("latin-1")


class VirtualWorkers:
    """A fake ``StaticWorkers``: the same queues on a virtual clock.

    Prompts of a request begin with its number, so that its output can be made as long as it should be.
    """

    now_ns = 0

    def __init__(self, executors: Sequence[SimpleNamespace]) -> None:
        self._truth = executors[0]
        self._free_ns = [0] * len(executors)
        self._done: list[tuple[int, int, BatchDone]] = []

    def __len__(self) -> int:
        return len(self._free_ns)

    def __enter__(self) -> "VirtualWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, worker: int, work: BatchWork) -> None:
        rows = [self._truth.requests[prompt[0]] for prompt in work.prompts]
        done = [len(prompt) - len(row.prompt) for prompt, row in zip(work.prompts, rows, strict=True)]
        left = [
            min(row.true_output_tokens - had, limit)
            for row, had, limit in zip(rows, done, work.limits, strict=True)
        ]
        ran = min(work.iterations, max(left))
        outputs, ended = [], []
        for row, had, own in zip(rows, done, left, strict=True):
            count = min(own, ran)
            ends = had + count == row.true_output_tokens
            outputs.append([65] * (count - ends) + [EOS] * ends)
            ended.append(ends)
        duration_ns = self._truth.duration_ns(work, ran)
        end_ns = max(self._free_ns[worker], VirtualWorkers.now_ns) + duration_ns
        self._free_ns[worker] = end_ns
        self._truth.recorded[work.number] = duration_ns / 1e9
        result = StaticResult(outputs, ended, ran, duration_ns)
        heapq.heappush(self._done, (end_ns, work.number, BatchDone(worker, work.number, end_ns, result)))

    def next_done(self, timeout_s: float | None) -> BatchDone | None:
        until = None if timeout_s is None else VirtualWorkers.now_ns + round(timeout_s * 1e9)
        if self._done and (until is None or self._done[0][0] <= until):
            end_ns, _, done = heapq.heappop(self._done)
            VirtualWorkers.now_ns = max(VirtualWorkers.now_ns, end_ns)
            return done
        assert until is not None, "the driver would wait for ever"
        VirtualWorkers.now_ns = until
        return None


class LoggedBatcher(GlobalBatcher):
    """Writes down what it assigns."""

    log: list[tuple[int, int, RequestBatch]]

    def dispatch(self, now_ns):
        assignments = super().dispatch(now_ns)
        LoggedBatcher.log += [
            (assignment.number, assignment.worker, assignment.batch) for assignment in assignments
        ]
        return assignments


def drive_really(monkeypatch, cluster: StaticCluster, requests: Sequence[Request], seed: int):
    """The real driver over fake engines: its outcome, its batches, and how long each of them took."""
    truth = SimpleNamespace(
        requests=requests,
        recorded={},
        duration_ns=lambda work, ran: round(1e9 * ran * (0.01 + 0.05 * uniform(seed, work.number))),
    )
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic_ns=lambda: VirtualWorkers.now_ns))
    monkeypatch.setattr(driver, "StaticWorkers", VirtualWorkers)
    monkeypatch.setattr(driver, "GlobalBatcher", LoggedBatcher)
    VirtualWorkers.now_ns, LoggedBatcher.log = 0, []
    limits = ServiceInfo(
        model="fake", context_tokens=CONTEXT, max_total_tokens=CONTEXT, kv_tokens=10**6, vocab_size=300,
        eos_token_ids=(EOS,),
    )  # fmt: skip
    info = EngineInfo(
        services={"chat": limits}, device="cpu", threads=1, block_size=1, merged_blocks=1, kv_bytes=1,
        weight_bytes=1,
    )  # fmt: skip
    engine = StaticEngine(
        Service(name="chat", model="fake"), cluster.options, lambda: truth, info, workers=cluster.workers,
        time=cluster.estimate, memory=cluster.memory, predictor=cluster.predictor,
    )  # fmt: skip
    texts = [
        replace(request, prompt=[number, *[65] * (len(request.prompt) - 1)])
        for number, request in enumerate(requests)
    ]
    outcome: StaticOutcome = engine.run(texts, ByteDecoder(), progress=False)
    return outcome, LoggedBatcher.log, truth.recorded
