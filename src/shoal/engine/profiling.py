"""Measures the step times of a real engine over a grid of shapes.

The engine runs synthetic prompts, so what is measured is what serving takes: the wall time between
successive scheduling calls, with scheduling, the forward pass, sampling and bookkeeping in it. One plan is in
flight, so that a time belongs to one plan. The shape of a step is taken from the plan itself.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import median

from shoal.core import ConfigError, Request, SamplingParams, StepPlan, StepResult, derive_seed
from shoal.engine.core import Engine
from shoal.engine.info import ServiceInfo
from shoal.engine.options import EngineOptions
from shoal.engine.profiling_grid import Grid, Round
from shoal.execute.protocol import Executor
from shoal.forecast import PaddedSample, StepShape
from shoal.schedule import Conservative, Fcfs, SchedulerOptions

DECODE_WINDOW = 9
"""Decode steps in a row that count as one shape, the middle one: they differ less than noise."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One shape of step and the median of its measured times in seconds (see ``pool_decodes``)."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class SliceSample:
    """A batch of equal prompts that generated ``output_tokens`` each, and the seconds that all of it took."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceMeasurements:
    """Everything measured of one service.

    steps: each shape once. prefill, decode: those among them that are one iteration of a padded batch
    (SCLS's N and L, or l). slices: measured apart, in no fit.
    """

    steps: tuple[Sample, ...]
    prefill: tuple[PaddedSample, ...]
    decode: tuple[PaddedSample, ...]
    slices: tuple[SliceSample, ...]


class ShapeRecorder:
    """Passes plans on to an executor, and knows the shape of the last one."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._computed: dict[int, int] = {}
        self._last: StepShape | None = None

    def submit(self, plan: StepPlan) -> None:
        """See Executor."""
        for sequence in plan.left:
            self._computed.pop(sequence, None)
        for joined in plan.joined:
            self._computed[joined.sequence] = joined.computed
        rows = [
            (count, self._computed[sequence])
            for sequence, count in zip(plan.sequences, plan.new_tokens, strict=True)
        ]
        for sequence, (count, computed) in zip(plan.sequences, rows, strict=True):
            self._computed[sequence] = computed + count
        self._last = StepShape.of(rows)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        """See Executor."""
        return self._executor.collect()

    def close(self) -> None:
        """See Executor."""
        self._executor.close()

    def take(self) -> StepShape | None:
        """The shape of the plan submitted since the last call; None if there was none."""
        shape, self._last = self._last, None
        return shape


def profiling_options(options: EngineOptions) -> EngineOptions:
    """The options of an engine to be measured: as configured, but what waits runs at once, in order.

    Nobody is evicted and no host memory is taken: a round that does not fit as a whole is left out.
    """
    scheduler = SchedulerOptions(
        order=Fcfs(),
        admission=Conservative(),
        eviction="recompute",
        preempt=False,
        max_running=options.scheduler.max_running,
        max_batched_tokens=options.scheduler.max_batched_tokens,
        depth=1,
    )
    return replace(options, scheduler=scheduler)


class Profiler:
    """Measures the services of an engine that was built with ``profiling_options``.

    recorder: what stands around the engine's executor (``build_engine``'s ``wrap``).
    """

    def __init__(self, engine: Engine, recorder: ShapeRecorder, options: EngineOptions) -> None:
        self._engine = engine
        self._recorder = recorder
        self._max_running = options.scheduler.max_running
        self._max_batched_tokens = options.scheduler.max_batched_tokens
        self._requests = 0

    def measure(
        self, service: str, info: ServiceInfo, grid: Grid, advance: Callable[[int, int], None]
    ) -> ServiceMeasurements:
        """Run ``grid`` on ``service``; ``advance`` hears how many rounds are done, of how many.

        Raises ConfigError if nothing of the grid fits in the engine.
        """
        rounds = [r for r in grid.rounds(self._max_batched_tokens) if self._fits(r, info)]
        slices = [r for r in grid.slices() if self._fits(r, info)]
        if not rounds or not slices:
            raise ConfigError(
                f"{service}: no batch of the grid fits: a request can have {info.max_total_tokens} tokens, "
                f"the KV pool holds {info.kv_tokens}, {self._max_running} requests can run at once, and the "
                f"grid needs {grid.slice_batches[0]} requests of {grid.slice_prompt + grid.slice_tokens} "
                "tokens; raise --kv-memory, --max-running or the service's max_model_len"
            )
        done, total = 0, grid.repeats * len(rounds) + len(slices) + 2
        for warm_up in (
            min(rounds, key=attrgetter("prefill_tokens")),
            max(rounds, key=attrgetter("prefill_tokens")),
        ):
            self._run(service, info, warm_up)
            advance(done := done + 1, total)
        times: dict[StepShape, list[float]] = defaultdict(list)
        # Repeats lie far apart in time, so that a disturbance of the machine spoils only one of a shape.
        for _ in range(grid.repeats):
            for one in rounds:
                for shape, seconds in pool_decodes(self._run(service, info, one)):
                    times[shape] += seconds
                advance(done := done + 1, total)
        slice_samples = []
        for one in slices:
            total_s = sum(seconds for _, seconds in self._run(service, info, one))
            slice_samples.append(SliceSample(one.sequences, one.prompt_tokens, one.output_tokens, total_s))
            advance(done := done + 1, total)
        medians = {shape: median(seconds) for shape, seconds in times.items()}
        prefill, decode = _padded_samples(medians, rounds)
        return ServiceMeasurements(
            steps=tuple(Sample(shape, seconds) for shape, seconds in medians.items()),
            prefill=tuple(prefill),
            decode=tuple(decode),
            slices=tuple(slice_samples),
        )

    def _fits(self, one: Round, info: ServiceInfo) -> bool:
        requests = one.sequences + (one.newcomer > 0)
        longest = max(one.prompt_tokens, one.newcomer) + one.output_tokens
        return (
            requests <= self._max_running
            and longest <= info.max_total_tokens
            and requests * longest <= info.kv_tokens
        )

    def _run(self, service: str, info: ServiceInfo, one: Round) -> list[tuple[StepShape, float]]:
        """Every step of one round with its seconds."""
        for _ in range(one.sequences):
            self._submit(service, info, one.prompt_tokens, one.output_tokens)
        starts: list[int] = []
        shapes: list[StepShape] = []
        while self._engine.busy:
            if len(shapes) == 2 and one.newcomer:
                self._submit(service, info, one.newcomer, one.output_tokens)
            started = self._engine.now_ns()
            self._engine.step()
            shape = self._recorder.take()
            if shape is None:
                if self._engine.waits:
                    raise RuntimeError(f"{service}: requests are unfinished, but the scheduler waits")
                continue
            starts.append(started)
            shapes.append(shape)
        starts.append(self._engine.now_ns())
        times = [(after - before) / 1e9 for before, after in pairwise(starts)]
        return list(zip(shapes, times, strict=True))

    def _submit(self, service: str, info: ServiceInfo, prompt_tokens: int, output_tokens: int) -> None:
        """A request with a prompt like no other, so that nothing is found in the prefix index."""
        self._requests += 1
        request = Request(
            id=f"profile-{self._requests}",
            service=service,
            prompt=[
                derive_seed(self._requests, position) % info.vocab_size for position in range(prompt_tokens)
            ],
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            arrival_ns=self._engine.now_ns(),
        )
        self._engine.submit(request)


def pool_decodes(steps: Sequence[tuple[StepShape, float]]) -> list[tuple[StepShape, list[float]]]:
    """Shapes with their times; decode steps in a row of equally many sequences are pooled in windows."""

    def kind(step: tuple[StepShape, float]) -> int:
        return step[0].sequences if step[0].prefill_work == 0 else 0

    pooled = []
    for sequences, run in groupby(steps, kind):
        alike = list(run)
        width = DECODE_WINDOW if sequences else 1
        for start in range(0, len(alike), width):
            window = alike[start : start + width]
            pooled.append((window[len(window) // 2][0], [seconds for _, seconds in window]))
    return pooled


def _padded_samples(
    medians: dict[StepShape, float], rounds: Sequence[Round]
) -> tuple[list[PaddedSample], list[PaddedSample]]:
    """Those steps that are a whole prefill, or one decode iteration, of a round's batch."""
    prefill, decode = {}, {}
    for one in rounds:
        size, prompt = one.sequences, one.prompt_tokens
        seconds = medians.get(StepShape.equal_rows(size, prompt, 0))
        if seconds is not None:
            prefill[size, prompt] = PaddedSample(size, prompt, seconds)
        for context in range(prompt, prompt + one.output_tokens - 1):
            seconds = medians.get(StepShape.equal_rows(size, 1, context))
            if seconds is not None:
                decode[size, context + 1] = PaddedSample(size, context + 1, seconds)
    return list(prefill.values()), list(decode.values())
