"""Runs of `benchmarks.fidelity_own`: profiling, the real engine with a client, and the simulation."""

import gc
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.fidelity_own.pace import Paced
from benchmarks.fidelity_own.workload import SERVICES
from shoal import Service
from shoal.config.presets import PRESETS
from shoal.core import Request, RequestRecord, SyntheticPrompt, TokenEvent
from shoal.engine import Engine, EngineOptions, assemble_engine
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.execute.protocol import Executor
from shoal.forecast import ModelSpec, RooflineTimes, StepRows, StepTimes, device_spec
from shoal.kvcache import KVCacheOptions, plan_layout
from shoal.models import resolve_model
from shoal.profile.grid import Grid
from shoal.profile.measure import Profiler, RowsRecorder, ServiceMeasurements, profiling_options
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch

PROFILE_KV_BYTES = 128 << 20
SWAP_POOLS = 4
"""Host memory for swapped KV, in KV pools."""


@dataclass(frozen=True)
class Setting:
    """Settings of all runs. cpu_time: clocks count CPU time of the single thread."""

    model: str
    dtype: str
    kv_bytes: int
    threads: int
    cpu_time: bool = False

    def service(self, name: str, execution_s: float | None = None) -> Service:
        return Service(name=name, model=self.model, dtype=self.dtype, execution_s=execution_s)


@dataclass
class Clock:
    """Nanoseconds: elapsed, or CPU time of this thread plus its waits."""

    cpu_time: bool
    waited_ns: int = 0

    def __call__(self) -> int:
        return time.thread_time_ns() + self.waited_ns if self.cpu_time else time.monotonic_ns()

    def wait(self, seconds: float) -> None:
        if self.cpu_time:
            self.waited_ns += round(seconds * 1e9)
        else:
            time.sleep(seconds)


@dataclass(frozen=True)
class Counts:
    preemptions: int
    end_s: float


@dataclass(frozen=True)
class Outcome:
    """One run, measured or simulated.

    steps: rows and seconds of each, if measured. started_s: start times of steps.
    """

    records: Sequence[RequestRecord]
    counts: Counts
    steps: Sequence[tuple[StepRows, float]] = ()
    started_s: Sequence[float] = ()


@dataclass
class Stopwatch:
    """Records rows, seconds and start of every step."""

    recorder: RowsRecorder
    steps: list[tuple[StepRows, float]] = field(default_factory=list)
    started_s: list[float] = field(default_factory=list)

    def note(self, started_s: float, seconds: float) -> None:
        rows = self.recorder.take()
        if rows is not None:
            self.steps.append((rows, seconds))
            self.started_s.append(started_s)


def load(setting: Setting) -> ModelSet:
    """Load the model once for both services."""
    services = tuple(setting.service(name) for name in SERVICES)
    folder = resolve_model(setting.model)
    return load_models(services, dict.fromkeys(SERVICES, folder), device="cpu", threads=setting.threads)


def options_of(
    setting: Setting, preset: str, execution_s: Mapping[str, float], kv_bytes: int
) -> EngineOptions:
    memory = KVCacheOptions(
        memory_bytes=kv_bytes, layout=PRESETS[preset].layout, swap_bytes=SWAP_POOLS * kv_bytes
    )
    return EngineOptions(
        services=tuple(setting.service(name, execution_s.get(name)) for name in SERVICES),
        kv_cache=memory,
        scheduler=PRESETS[preset].scheduler,
        threads=setting.threads,
    )


def profile_model(
    setting: Setting, models: ModelSet, grid: Grid, advance: Callable[[int, int], None]
) -> ServiceMeasurements:
    """Step times of the model, measured as in `shoal profile`, in an engine with enough KV memory."""
    options = profiling_options(options_of(setting, "vllm", {}, PROFILE_KV_BYTES))
    recorders: list[RowsRecorder] = []
    engine, info = assemble_engine(options, models, threads=setting.threads, wrap=_recording(recorders))
    engine._clock = Clock(setting.cpu_time)
    gc.collect()
    try:
        return Profiler(engine, recorders[0], options).measure(
            SERVICES[0], info.services[SERVICES[0]], grid, advance
        )
    finally:
        engine.close()


def data_sheet_times(setting: Setting) -> StepTimes:
    """Step times by the data sheet of a CPU alone."""
    config = json.loads((resolve_model(setting.model) / "config.json").read_text(encoding="utf-8"))
    size = 4.0 if setting.dtype == "float32" else 2.0
    shape = replace(ModelSpec.from_config(config), weight_bytes_each=size, kv_bytes_each=size)
    return RooflineTimes(shape, device_spec("cpu"))


def _recording(made: list[RowsRecorder]) -> Callable[[Executor], Executor]:
    def wrap(executor: Executor) -> Executor:
        made.append(RowsRecorder(executor))
        return made[-1]

    return wrap


def run_engine(
    setting: Setting,
    models: ModelSet,
    preset: str,
    requests: Sequence[Request],
    execution_s: Mapping[str, float],
) -> Outcome:
    """Run the requests in real time on the real engine in this process."""
    recorders: list[RowsRecorder] = []
    options = options_of(setting, preset, execution_s, setting.kv_bytes)
    engine, _ = assemble_engine(options, models, threads=setting.threads, wrap=_recording(recorders))
    clock = Clock(setting.cpu_time)
    engine._clock = clock
    gc.collect()
    try:
        return Client(engine, clock, requests, Stopwatch(recorders[0])).run()
    finally:
        engine.close()


class Client:
    """Submits requests at their arrival, and records the times of their tokens."""

    def __init__(self, engine: Engine, clock: Clock, requests: Sequence[Request], watch: Stopwatch) -> None:
        self._engine = engine
        self._clock = clock
        self._watch = watch
        self._start_ns = clock()
        self._upcoming = deque(requests)
        self._requests = {one.id: one for one in requests}
        self._first: dict[str, int] = {}
        self._tokens = dict.fromkeys(self._requests, 0)
        self._ended: list[RequestRecord] = []

    def run(self) -> Outcome:
        """Run until all requests have ended."""
        engine = self._engine
        while self._upcoming or engine.busy:
            started_ns = self._now_ns()
            self._submit_due(started_ns)
            if not engine.busy or engine.idle:
                self._wait(started_ns)
                started_ns = self._now_ns()
                self._submit_due(started_ns)
            if engine.busy:
                events = engine.step()
                now_ns = self._now_ns()
                for event in events:
                    self._note(event, now_ns)
                self._watch.note(started_ns / 1e9, (self._now_ns() - started_ns) / 1e9)
        stats = engine.stats().services.values()
        return Outcome(
            self._ended,
            Counts(sum(one.preemptions for one in stats), self._now_ns() / 1e9),
            self._watch.steps,
            self._watch.started_s,
        )

    def _now_ns(self) -> int:
        return self._clock() - self._start_ns

    def _submit_due(self, now_ns: int) -> None:
        while self._upcoming and self._upcoming[0].arrival_ns <= now_ns:
            one = self._upcoming.popleft()
            self._engine.submit(replace(one, arrival_ns=one.arrival_ns + self._start_ns))

    def _wait(self, now_ns: int) -> None:
        """Wait for the next arrival, or for ``idle_until_ns`` of the engine."""
        until = [one.arrival_ns for one in list(self._upcoming)[:1]]
        if self._engine.idle_until_ns is not None:
            until.append(max(self._engine.idle_until_ns - self._start_ns, now_ns + 1_000_000))
        if until:
            self._clock.wait(max(0, min(until) - now_ns) / 1e9)

    def _note(self, event: TokenEvent, now_ns: int) -> None:
        if event.error is not None:
            raise SystemExit(f"request {event.request_id} failed: {event.error}")
        if event.tokens:
            self._first.setdefault(event.request_id, now_ns)
            self._tokens[event.request_id] += len(event.tokens)
        if event.finish is not None:
            one = self._requests[event.request_id]
            self._ended.append(
                RequestRecord(
                    request_id=one.id,
                    service=one.service,
                    arrival_ns=one.arrival_ns,
                    first_token_ns=self._first[one.id],
                    finish_ns=now_ns,
                    prompt_tokens=len(one.prompt),
                    output_tokens=self._tokens[one.id],
                )
            )


def simulate(
    setting: Setting,
    models: ModelSet,
    preset: str,
    requests: Sequence[Request],
    execution_s: Mapping[str, float],
    times: StepTimes,
) -> Outcome:
    """Simulate the requests with the same pool and scheduler."""
    options = options_of(setting, preset, execution_s, setting.kv_bytes)
    layout = plan_layout(
        models.kv_shapes,
        memory_bytes=setting.kv_bytes,
        block_size=options.kv_cache.block_size,
        kind=options.kv_cache.layout,
    )
    spec = EngineSpec(
        services={
            name: ServiceSpec(
                times=times,
                context_tokens=models.services[name].context_tokens,
                execution_s=execution_s.get(name),
                weights=models.services[name].weights,
            )
            for name in SERVICES
        },
        layout=layout,
        scheduler=options.scheduler,
        host=layout.resized(SWAP_POOLS * setting.kv_bytes)
        if options.scheduler.preemption_mode == "swap"
        else None,
    )
    synthetic = [replace(one, prompt=SyntheticPrompt(len(one.prompt))) for one in requests]
    simulation = Simulation([spec], OpenLoop(synthetic), watch=Watch(skip_ahead=not isinstance(times, Paced)))
    if isinstance(times, Paced):
        times.clock = simulation._clock
    record = simulation.run()
    unanswered = [one for one in record.requests if not one.answered]
    if unanswered:
        raise SystemExit(
            f"request {unanswered[0].request_id} was {unanswered[0].finish}: {unanswered[0].error}"
        )
    return Outcome(record.requests, Counts(record.engines[0].preemptions, record.end_ns / 1e9))
