"""The simulator and the real engine make the same decisions: identical schedule logs on the same input.

A real engine runs tiny models; every step's measured time is written down, and its clock moves by it. The
simulator gets the same requests, pool and scheduler, and the recorded times. The logs also say when each plan
was made and what its steps took, which is what decisions by time go by.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from end_to_end_builders import make_request
from execute_builders import make_model, make_prompt, tiny_config

from at_hand import DEVICE
from crossed import crossed, each_nth
from shoal.config import PRESETS
from shoal.core import SLO, Request, ResumeState, Service, StepPlan, StepResult
from shoal.engine import Engine, EngineOptions, build_engine
from shoal.execute.protocol import Executor, Interrupted, never
from shoal.forecast import StepRows
from shoal.kvcache import KVCacheOptions
from shoal.schedule import ORDERS, Conservative, Fcfs, SchedulerOptions, Slice, describe
from shoal.schedule.inter_token_latency import InterTokenLatencyGuard
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch

SERVICES = ("gemma3", "gpt2")
TUNED: dict[str, dict[str, Any]] = {"scls-cb": {"admission": Slice(tokens=6)}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in SERVICES}


def workload(seed: int, count: int = 24) -> list[Request]:
    """Requests of both services; some share the beginning of their prompts, some go on from output made
    before, and the last comes late."""
    random = Random(seed)
    shared = {service: make_prompt(40, seed=seed) for service in SERVICES}
    requests = []
    arrival_s = 0.0
    for number in range(count):
        arrival_s += random.expovariate(80.0)
        service = random.choice(SERVICES)
        own = make_prompt(random.randint(1, 30), seed=1_000 * seed + number)
        prompt = [*shared[service][: random.choice((0, 0, 16, 40))], *own]
        request = make_request(f"r{number}", service, prompt, random.randint(1, 24))
        if number % 6 == 5:
            request = resumed(request, make_prompt(random.randint(0, 23), seed=number))
        requests.append(replace(request, arrival_ns=round(arrival_s * 1e9)))
    alone = make_request("alone", SERVICES[0], make_prompt(10, seed=seed), 9)
    requests.append(replace(alone, arrival_ns=3600 * 10**9))
    return requests


def resumed(request: Request, output: Sequence[int]) -> Request:
    """A request that was admitted elsewhere a while ago, and has some output."""
    most = request.sampling.max_tokens
    assert most is not None
    state = ResumeState(max_new_tokens=most, age_ns=10**8, last_token_age_ns=10**7, num_admissions=1)
    return replace(request, output_tokens=tuple(output[:most]), resume_state=state)


@dataclass
class Recorder:
    """An executor that measures every step, and the clock that goes by these times.

    Requests that arrive while a step is under way are submitted at their own times, as they would be by
    whoever listens beside the engine.
    """

    executor: Executor
    coming: deque[Request]
    engine: Engine = field(init=False)
    now_ns: int = 0
    times_ns: list[list[int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    made: deque[tuple[StepPlan, int]] = field(default_factory=deque)
    ends_ns: int = 0
    laps_ns: list[int] = field(default_factory=list)
    lapped_ns: int = 0

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        self.made.append((plan, self.now_ns))
        self.laps_ns, self.lapped_ns = [], time.perf_counter_ns()
        self.executor.submit(plan, self.is_due if plan.iterations > 1 else interrupted)

    def is_due(self) -> bool:
        """Whether a request has arrived by the end of an iteration, which is measured."""
        now_ns = time.perf_counter_ns()
        self.laps_ns.append(now_ns - self.lapped_ns)
        self.lapped_ns = now_ns
        return bool(self.coming) and self.coming[0].arrival_ns <= self.made[-1][1] + sum(self.laps_ns)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        taken_ns = list(self.laps_ns)
        if len(taken_ns) < len(result.tokens):
            # Timer resolution aside, every step takes some time.
            taken_ns.append(max(1_000, result.duration_ns - sum(taken_ns)))
        self.times_ns.append(taken_ns)
        plan, made_ns = self.made.popleft()
        self.log.append(describe(plan, made_ns, taken_ns))
        self.ends_ns = max(made_ns, self.ends_ns) + sum(taken_ns)
        self.arrivals_before(self.ends_ns)
        self.now_ns = self.ends_ns
        return replace(result, durations_ns=taken_ns)

    def close(self) -> None:
        self.executor.close()

    def arrivals_before(self, until_ns: int) -> None:
        while self.coming and self.coming[0].arrival_ns < until_ns:
            request = self.coming.popleft()
            self.now_ns = request.arrival_ns
            self.engine.submit(request)

    def run(self) -> None:
        while self.coming or self.engine.busy:
            self.arrivals_before(self.now_ns + 1)
            self.engine.begin()
            if self.engine.idle:
                times = [self.coming[0].arrival_ns] if self.coming else []
                if self.engine.idle_until_ns is not None:
                    times.append(max(self.engine.idle_until_ns, self.now_ns + 1_000_000))
                self.now_ns = max(self.now_ns, min(times))
            else:
                self.engine.complete()


@dataclass
class Recorded:
    """Step times in the order in which they were recorded, a list for each plan."""

    times_ns: deque[list[int]]

    def step_time(self, rows: StepRows) -> float:
        [time_ns] = self.times_ns.popleft()
        return time_ns / 1e9

    def decode_times(self, sequences: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        times_ns = self.times_ns.popleft()
        # An arrival comes before those that were not made.
        return np.array(times_ns + [1_000_000] * (steps - len(times_ns))) / 1e9


def real(folders: dict[str, Path], options: EngineOptions, requests: Sequence[Request]) -> Recorder:
    made: list[Recorder] = []

    def wrap(executor: Executor) -> Executor:
        made.append(Recorder(executor, deque(requests)))
        return made[0]

    engine, _ = build_engine(options, folders, wrap=wrap)
    recorder = made[0]
    recorder.engine = engine
    engine._clock = lambda: recorder.now_ns
    recorder.run()
    engine.close()
    return recorder


def simulated(engine: Engine, times_ns: Sequence[list[int]], requests: Sequence[Request]) -> list[str]:
    times = Recorded(deque(times_ns))
    scheduler, host = engine._scheduler, engine._scheduler._store._host
    spec = EngineSpec(
        services={
            name: ServiceSpec(
                times=times,
                context_tokens=limits.context_tokens,
                execution_s=limits.execution_s,
                slo=limits.slo,
                quota=limits.quota,
                starvation_s=limits.starvation_s,
                weights=limits.weights,
            )
            for name, limits in scheduler._limits.items()
        },
        layout=engine._pool.layout,
        scheduler=scheduler.options,
        host=None if host is None else host.layout,
        host_bytes_per_s=float("inf"),
        prefix_caching=engine._pool.prefix_caching,
    )
    log: list[str] = []
    watch = Watch(skip_ahead=False)
    simulation = Simulation(
        [spec], OpenLoop(requests), watch=watch, on_plan=lambda _, *plan: log.append(describe(*plan))
    )
    simulation.run()
    return log


@pytest.mark.parametrize("on_hopeless", ["last", "refuse"])
@pytest.mark.parametrize("max_iterations", [1, 4])
def test_they_agree_on_who_is_too_late(
    folders: dict[str, Path], on_hopeless: str, max_iterations: int
) -> None:
    scheduler = SchedulerOptions(
        order=Fcfs(), on_hopeless=on_hopeless, max_iterations=max_iterations, max_running=3
    )
    goals = SLO(ttft_s=5e-7, e2e_s=0.5)  # shorter than any step
    services = [
        Service(name=name, model=str(folder), dtype="float32", slo=goals) for name, folder in folders.items()
    ]
    cache = KVCacheOptions(memory_bytes=160 << 10, block_size=4)
    options = EngineOptions(
        services=tuple(services), kv_cache=cache, scheduler=scheduler, threads=1, device=DEVICE
    )
    # Of six that come at once three can run: the others wait for a step, and are too late then.
    burst = [make_request(f"burst{number}", SERVICES[0], make_prompt(10, number), 4) for number in range(6)]
    requests = workload(seed=3) + [replace(request, arrival_ns=7200 * 10**9) for request in burst]
    recorder = real(folders, options, requests)
    assert simulated(recorder.engine, recorder.times_ns, requests) == recorder.log
    refused = sum(stats.cancelled for stats in recorder.engine.stats().services.values())
    assert (refused > 0) == (on_hopeless == "refuse")


@pytest.mark.parametrize(
    ("preset", "steps", "overcommitted"),
    crossed(each_nth(PRESETS, 4), [(1, 1), (2, 1), (1, 4)], [True, False]),
)
def test_real_engine_and_simulator_write_the_same_schedule_log(
    folders: dict[str, Path], preset: str, steps: tuple[int, int], overcommitted: bool
) -> None:
    """steps: plans in flight, and most iterations of one."""
    depth, max_iterations = steps
    knobs: dict[str, Any] = {"depth": depth, "max_iterations": max_iterations, **TUNED.get(preset, {})}
    if overcommitted and preset not in TUNED:
        knobs["admission"] = Conservative(overcommit=20.0)
    log = compare(folders, preset, workload(seed=2 if overcommitted else 1), **knobs)
    assert any("iterations" in line for line in log) == (max_iterations > 1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ["weighted-turns", "fcfs"])
def test_they_do_so_for_services_on_one_model(folders: dict[str, Path], order: str, depth: int) -> None:
    shared = dict.fromkeys(SERVICES, folders["gemma3"])
    log = compare(shared, "shoal", workload(seed=3), order=ORDERS[order](), depth=depth)
    assert any("; " in line for line in log)


@pytest.mark.parametrize("depth", [1, 2])
def test_they_step_services_whose_streams_waited_too_long_at_the_same_times(
    folders: dict[str, Path], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = []
    urgent = InterTokenLatencyGuard._due_before

    def noted(self: InterTokenLatencyGuard, *args: Any) -> str | None:
        stepped.append(urgent(self, *args))
        return stepped[-1]

    monkeypatch.setattr(InterTokenLatencyGuard, "_due_before", noted)
    short = [make_request(f"short{number}", SERVICES[0], make_prompt(4, number), 12) for number in range(40)]
    short = [replace(one, arrival_ns=10**7 + number * 10**6) for number, one in enumerate(short)]
    stream = make_request("stream", SERVICES[1], make_prompt(4), 40)
    preferring = dict(zip(SERVICES, (0.001, 1.0), strict=True))
    compare(folders, "shoal", [stream, *short], preferring, 1 << 20, depth=depth, max_token_gap_s=2e-5)
    assert SERVICES[1] in stepped


def compare(
    folders: dict[str, Path],
    preset: str,
    requests: Sequence[Request],
    execution_s: Mapping[str, float] | None = None,
    memory_bytes: int = 160 << 10,
    **knobs: Any,
) -> list[str]:
    """The log of both, which must be the same; ``knobs`` go over those of the preset."""
    chosen = PRESETS[preset]
    options = EngineOptions(
        services=tuple(
            Service(
                name=name, model=str(folder), dtype="float32", execution_s=(execution_s or {}).get(name, 0.05)
            )
            for name, folder in folders.items()
        ),
        kv_cache=KVCacheOptions(memory_bytes=memory_bytes, block_size=4, layout=chosen.layout),
        scheduler=replace(chosen.scheduler, **knobs),
        threads=1,
        device=DEVICE,
    )
    recorder = real(folders, options, requests)
    log = simulated(recorder.engine, recorder.times_ns, requests)
    assert len(log) > 20
    assert log == recorder.log
    return log
