"""One run of `two_services.py`: requests at their times into one engine, or into two of half the size."""

import gc
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from shoal import SamplingParams, Service
from shoal.config.presets import PRESETS
from shoal.core import SLO, ConfigError, Request, ShoalError
from shoal.engine import Engine, EngineOptions, assemble_engine
from shoal.execute.loading import ModelSet, load_models
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model
from shoal.schedule import SchedulerOptions
from two_services_workload import SERVICES, Arrival

E2E_SCALE = 5.0
"""The goal of every request: its end within so many times the execution time of its service."""

DEDICATED = "dedicated"
MERGED_ROUND_ROBIN = "round-robin"
POLICIES = (*PRESETS, MERGED_ROUND_ROBIN, DEDICATED)
HEAD_START_NS = 500_000_000
"""For both dedicated engines to be built before the first request arrives."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common. max_tokens: what every request asks for, more than it will get.

    seconds: of arrivals; warm_up: of these, at the start, whose requests are served but not counted.
    execution_s: L^ of each service; None while it is being measured.
    """

    model: str
    dtype: str
    kv_bytes: int
    max_tokens: int
    seconds: float
    drain: float
    warm_up: float
    execution_s: Mapping[str, float] | None = None

    def services(self, names: Sequence[str] = SERVICES) -> tuple[Service, ...]:
        """The services by these names."""
        known = self.execution_s or {}
        return tuple(
            Service(
                name=name,
                model=self.model,
                dtype=self.dtype,
                execution_s=known.get(name),
                slo=SLO(e2e_scale=E2E_SCALE) if name in known else SLO(),
            )
            for name in names
        )


@dataclass(frozen=True)
class Outcome:
    """What became of one request, in seconds from the start of the run.

    first_s: of its first token, finish_s: of its last; None where the run ended before.
    """

    service: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None
    finish_s: float | None


@dataclass(frozen=True)
class Counts:
    """What one service's engine had to do twice."""

    evictions: int
    recomputed_tokens: int
    swapped_tokens: int


@dataclass(frozen=True)
class Run:
    """One policy under one workload; ended_s: when it was over, in seconds from its start."""

    outcomes: list[Outcome]
    counts: dict[str, Counts]
    ended_s: float


def policy_of(name: str) -> tuple[SchedulerOptions, str]:
    """The scheduler of a policy, and the layout of its KV pool."""
    if name == MERGED_ROUND_ROBIN:
        return PRESETS["muxserve"].scheduler, "merged"
    return PRESETS[name].scheduler, PRESETS[name].layout


def load(setting: Setting, names: Sequence[str], threads: int) -> ModelSet:
    """The model, once, for all services that name it."""
    services = setting.services(names)
    folders = {service.name: resolve_model(service.model) for service in services}
    return load_models(services, folders, device="cpu", threads=threads)


def build(setting: Setting, models: ModelSet, policy: str, names: Sequence[str], threads: int) -> Engine:
    """A fresh engine around models that are in memory already."""
    scheduler, layout = policy_of(policy)
    memory = KVCacheOptions(memory_bytes=setting.kv_bytes, layout=layout)
    options = EngineOptions(
        services=setting.services(names), kv_cache=memory, scheduler=scheduler, threads=threads
    )
    return assemble_engine(options, models, threads=threads)[0]


def request_of(one: Arrival, max_tokens: int, start_ns: int) -> Request:
    """Ends after exactly its output tokens, which no policy is told (but the oracle)."""
    return Request(
        id=one.id,
        service=one.service,
        prompt=one.prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        arrival_ns=start_ns + round(one.at_s * 1e9),
        true_output_tokens=one.output_tokens,
    )


class Client:
    """Submits requests when they arrive, and notes when their tokens come."""

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival], setting: Setting, start_ns: int) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._setting = setting
        self._start_ns = start_ns
        self._next = 0
        self._first: dict[str, float] = {}
        self._finish: dict[str, float] = {}
        self._tokens = {one.id: 0 for one in arrivals}

    def run(self) -> Run:
        """Until all have ended, or the time to drain is over."""
        cap_s = self._setting.seconds + self._setting.drain
        while (now_s := self._now_s()) < cap_s:
            self._submit_due(now_s)
            if self._engine.waits or not self._engine.busy:
                if self._next == len(self._arrivals) and not self._engine.busy:
                    break
                self._sleep(now_s, cap_s)
                continue
            self._step()
        return Run(self._outcomes(), self._counts(), min(self._now_s(), cap_s))

    def _now_s(self) -> float:
        return (self._engine.now_ns() - self._start_ns) / 1e9

    def _submit_due(self, now_s: float) -> None:
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_s <= now_s:
            one = self._arrivals[self._next]
            self._engine.submit(request_of(one, self._setting.max_tokens, self._start_ns))
            self._next += 1

    def _sleep(self, now_s: float, cap_s: float) -> None:
        """Until the next arrival, the time the engine asked for, or the end."""
        until_s = cap_s
        if self._next < len(self._arrivals):
            until_s = min(until_s, self._arrivals[self._next].at_s)
        if self._engine.busy and self._engine.idle_until_ns is not None:
            asked_s = (self._engine.idle_until_ns - self._start_ns) / 1e9
            if asked_s <= now_s:
                self._step()
                return
            until_s = min(until_s, asked_s)
        time.sleep(max(0.0, until_s - now_s))

    def _step(self) -> None:
        events = self._engine.step()
        now_s = self._now_s()
        for event in events:
            if event.tokens:
                self._first.setdefault(event.request_id, now_s)
                self._tokens[event.request_id] += len(event.tokens)
            if event.error is not None:
                raise SystemExit(f"request {event.request_id} failed: {event.error}")
            if event.finish is not None:
                self._finish[event.request_id] = now_s

    def _outcomes(self) -> list[Outcome]:
        return [
            Outcome(
                one.service,
                one.at_s,
                len(one.prompt),
                self._tokens[one.id],
                self._first.get(one.id),
                self._finish.get(one.id),
            )
            for one in self._arrivals
            if one.at_s >= self._setting.warm_up
        ]

    def _counts(self) -> dict[str, Counts]:
        return {
            name: Counts(stats.evictions, stats.recomputed_tokens, stats.swapped_tokens)
            for name, stats in self._engine.stats().services.items()
        }


def run_shared(
    setting: Setting, models: ModelSet, policy: str, arrivals: Sequence[Arrival], threads: int
) -> Run:
    """Both services in one engine of this process."""
    engine = build(setting, models, policy, SERVICES, threads)
    gc.collect()
    try:
        return Client(engine, arrivals, setting, engine.now_ns()).run()
    finally:
        engine.close()


@dataclass(frozen=True)
class HalfJob:
    """One run of one of the dedicated engines."""

    setting: Setting
    arrivals: list[Arrival]
    start_ns: int


def _serve_half(pipe: Connection, setting: Setting, name: str) -> None:
    """The process of one dedicated engine: one service, one thread, first come first served."""
    models = load(setting, (name,), threads=1)
    pipe.send("ready")
    while True:
        job: HalfJob | None = pipe.recv()
        if job is None:
            return
        try:
            engine = build(job.setting, models, "vllm", (name,), threads=1)
            gc.collect()
            pipe.send(Client(engine, job.arrivals, job.setting, job.start_ns).run())
        except ShoalError as error:
            pipe.send(error)
            return
        engine.close()
        del engine


class Halves:
    """Two engines in two processes, each with one service, one thread and half of the KV memory.

    They are started once, and wait (without using a core) while other policies run.
    """

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for name in SERVICES:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve_half, args=(theirs, setting, name), daemon=True)
            process.start()
            theirs.close()
            self._pipes[name] = mine
            self._processes.append(process)
        for pipe in self._pipes.values():
            pipe.recv()

    def run(self, setting: Setting, arrivals: Sequence[Arrival]) -> Run:
        """As ``run_shared``, each service in its own engine."""
        half = replace(setting, kv_bytes=setting.kv_bytes // 2)
        start_ns = time.monotonic_ns() + HEAD_START_NS
        for name, pipe in self._pipes.items():
            pipe.send(HalfJob(half, [one for one in arrivals if one.service == name], start_ns))
        runs: list[Run] = []
        for name, pipe in self._pipes.items():
            answer: Run | ShoalError = pipe.recv()
            if isinstance(answer, ShoalError):
                raise ConfigError(f"the dedicated engine of {name}: {answer}") from answer
            runs.append(answer)
        return Run(
            [outcome for run in runs for outcome in run.outcomes],
            {name: counts for run in runs for name, counts in run.counts.items()},
            max(run.ended_s for run in runs),
        )

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
