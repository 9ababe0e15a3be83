"""Runs of `benchmarks.two_services`: requests in real time on one engine, or on two of half the size."""

import gc
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.two_services.outcome import Counts, Outcome, Run
from benchmarks.two_services.policies import policy_of
from benchmarks.two_services.workload import SERVICES, Arrival
from shoal import SamplingParams, Service
from shoal.core import SLO, ConfigError, Request, ShoalError
from shoal.engine import Engine, EngineOptions, assemble_engine
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.kvcache import KVCacheOptions
from shoal.measure import InterTokenLatencies
from shoal.models import resolve_model

E2E_SCALE = 5.0
"""SLO of every request: E2E latency within this multiple of its service's execution time."""

HEAD_START_NS = 500_000_000
"""Time to build both dedicated engines before the first arrival."""


@dataclass(frozen=True)
class Setting:
    """Settings of all runs.

    max_tokens: of every request, above its true length. seconds: of arrivals. warm_up: first seconds, whose
    requests are not counted. names: of the services. execution_s: L^ of each; None while it is measured.
    """

    model: str
    dtype: str
    kv_bytes: int
    max_tokens: int
    seconds: float
    drain: float
    warm_up: float
    names: tuple[str, ...]
    execution_s: Mapping[str, float] | None = None

    def services(self, names: Sequence[str]) -> tuple[Service, ...]:
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


def load(setting: Setting, names: Sequence[str], threads: int) -> ModelSet:
    """Load the model once for all services."""
    services = setting.services(names)
    folders = {service.name: resolve_model(service.model) for service in services}
    return load_models(services, folders, device="cpu", threads=threads)


def build(setting: Setting, models: ModelSet, policy: str, names: Sequence[str], threads: int) -> Engine:
    """A new engine of loaded models."""
    scheduler, layout = policy_of(policy)
    memory = KVCacheOptions(memory_bytes=setting.kv_bytes, layout=layout)
    options = EngineOptions(
        services=setting.services(names), kv_cache=memory, scheduler=scheduler, threads=threads
    )
    return assemble_engine(options, models, threads=threads)[0]


def request_of(one: Arrival, max_tokens: int, start_ns: int) -> Request:
    """A request that ends at its true length, known to the oracle alone."""
    return Request(
        id=one.id,
        service=one.service,
        prompt=one.prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        arrival_ns=start_ns + round(one.at_s * 1e9),
        true_output_tokens=one.output_tokens,
    )


class Client:
    """Submits requests at their arrival, and records the times of their tokens."""

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival], setting: Setting, start_ns: int) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._setting = setting
        self._start_ns = start_ns
        self._next = 0
        self._outcomes = {one.id: Outcome(one.service, one.at_s, len(one.prompt)) for one in arrivals}
        self._gaps_ns: dict[str, list[int]] = {one.service: [] for one in arrivals}

    def run(self) -> Run:
        """Run until all requests have ended, or the drain time is over."""
        limit_s = self._setting.seconds + self._setting.drain
        while (now_s := self._now_s()) < limit_s:
            self._submit_due(now_s)
            if self._engine.idle or not self._engine.busy:
                if self._next == len(self._arrivals) and not self._engine.busy:
                    break
                self._sleep(now_s, limit_s)
                continue
            self._step()
        return self._result(min(self._now_s(), limit_s))

    def _now_s(self) -> float:
        return (self._engine.now_ns() - self._start_ns) / 1e9

    def _submit_due(self, now_s: float) -> None:
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_s <= now_s:
            one = self._arrivals[self._next]
            self._engine.submit(request_of(one, self._setting.max_tokens, self._start_ns))
            self._next += 1

    def _sleep(self, now_s: float, limit_s: float) -> None:
        """Wait for the next arrival, ``idle_until_ns`` of the engine, or the end."""
        until_s = limit_s
        if self._next < len(self._arrivals):
            until_s = min(until_s, self._arrivals[self._next].at_s)
        if self._engine.busy and self._engine.idle_until_ns is not None:
            idle_until_s = (self._engine.idle_until_ns - self._start_ns) / 1e9
            if idle_until_s <= now_s:
                self._step()
                return
            until_s = min(until_s, idle_until_s)
        time.sleep(max(0.0, until_s - now_s))

    def _step(self) -> None:
        events = self._engine.step()
        now_s = self._now_s()
        for event in events:
            one = self._outcomes[event.request_id]
            if event.tokens:
                gap_s = one.receive(len(event.tokens), now_s)
                if gap_s is not None and self._counts(one):
                    self._gaps_ns[one.service].append(round(gap_s * 1e9))
            if event.error is not None:
                raise SystemExit(f"request {event.request_id} failed: {event.error}")
            if event.finish is not None:
                one.finish_s = now_s

    def _counts(self, one: Outcome) -> bool:
        return one.at_s >= self._setting.warm_up

    def _result(self, ended_s: float) -> Run:
        outcomes = [one for one in self._outcomes.values() if self._counts(one)]
        for one in outcomes:
            one.break_off(ended_s)
        gaps = {name: InterTokenLatencies() for name in self._gaps_ns}
        for name, gaps_ns in self._gaps_ns.items():
            gaps[name].add(np.array(gaps_ns, dtype=np.int64))
        return Run(outcomes, gaps, self._repeated_work(), ended_s)

    def _repeated_work(self) -> dict[str, Counts]:
        return {
            name: Counts(stats.preemptions, stats.recomputed_tokens, stats.swapped_tokens)
            for name, stats in self._engine.stats().services.items()
        }


def run_shared(
    setting: Setting, models: ModelSet, policy: str, arrivals: Sequence[Arrival], threads: int
) -> Run:
    """Run all services on one engine in this process."""
    engine = build(setting, models, policy, setting.names, threads)
    gc.collect()
    try:
        return Client(engine, arrivals, setting, engine.now_ns()).run()
    finally:
        engine.close()


@dataclass(frozen=True)
class DedicatedJob:
    """One run of a dedicated engine."""

    setting: Setting
    arrivals: list[Arrival]
    start_ns: int


def _serve_dedicated(pipe: Connection, setting: Setting, name: str) -> None:
    """Process of a dedicated engine: one service, one thread, FCFS."""
    models = load(setting, (name,), threads=1)
    pipe.send("ready")
    while True:
        job: DedicatedJob | None = pipe.recv()
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


class DedicatedEngines:
    """Two engine processes, each with one service, one thread and half of the KV memory.

    They are started once, and are idle while other policies run.
    """

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for name in SERVICES:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve_dedicated, args=(theirs, setting, name), daemon=True)
            process.start()
            theirs.close()
            self._pipes[name] = mine
            self._processes.append(process)
        for pipe in self._pipes.values():
            pipe.recv()

    def run(self, setting: Setting, arrivals: Sequence[Arrival]) -> Run:
        """Like ``run_shared``, with each service on its own engine."""
        half = replace(setting, kv_bytes=setting.kv_bytes // 2)
        start_ns = time.monotonic_ns() + HEAD_START_NS
        for name, pipe in self._pipes.items():
            pipe.send(DedicatedJob(half, [one for one in arrivals if one.service == name], start_ns))
        runs: list[Run] = []
        for name, pipe in self._pipes.items():
            answer: Run | ShoalError = pipe.recv()
            if isinstance(answer, ShoalError):
                raise ConfigError(f"the dedicated engine of {name}: {answer}") from answer
            runs.append(answer)
        return Run(
            [outcome for run in runs for outcome in run.outcomes],
            {name: gaps for run in runs for name, gaps in run.gaps.items()},
            {name: counts for run in runs for name, counts in run.counts.items()},
            max(run.ended_s for run in runs),
        )

    def close(self) -> None:
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
