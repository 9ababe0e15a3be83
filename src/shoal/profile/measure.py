"""Measures the step times of a real engine over a grid of batch shapes.

The engine serves synthetic prompts. A step time is the wall time between successive scheduling calls, so it
includes scheduling, the forward pass, sampling and bookkeeping. One plan is in flight, so that a time belongs
to one plan. The shape of a step is taken from its plan.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import fmean, median_low

from shoal.core import Arrival, ConfigError, Request, SamplingParams, StepPlan, StepResult, derive_seed
from shoal.engine.core import Engine
from shoal.engine.info import ServiceInfo
from shoal.engine.options import EngineOptions
from shoal.execute.protocol import Executor, Interrupted, StepFailed, never
from shoal.forecast import PaddedSample, StepRows, StepShape
from shoal.profile.grid import BatchRound, Grid
from shoal.schedule import Conservative, Fcfs, SchedulerOptions

DECODE_WINDOW = 9
"""Consecutive decode steps that count as one shape, the middle one: they differ by less than noise."""

JITTER = 0.25
"""Maximum relative deviation of a time from the median of its shape; larger ones count as disturbed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Shape and typical seconds of one kind of step (see ``typical_seconds``, ``pool_decodes``).

    equal: whether it belongs to a batch of equal prompts.
    """

    rows: StepRows
    seconds: float
    equal: bool

    @property
    def shape(self) -> StepShape:
        return self.rows.shape


@dataclass(frozen=True, slots=True)
class SliceSample:
    """A batch of prompts with ``output_tokens`` each, and its total seconds."""

    prompts: tuple[int, ...]
    output_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceMeasurements:
    """Measurements of one service.

    steps: each kind of step once. prefill, decode: the steps that are one iteration of a padded batch
    (N and L, or l, of SCLS). slices: whole batches, which are in no fit.
    """

    steps: tuple[Sample, ...]
    prefill: tuple[PaddedSample, ...]
    decode: tuple[PaddedSample, ...]
    slices: tuple[SliceSample, ...]


class RowsRecorder:
    """Wraps an executor, and records the shape of the last plan, which has one iteration."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._computed: dict[int, int] = {}
        self._last: StepRows | None = None

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """See Executor."""
        self._executor.submit(plan, interrupted)
        if not plan.seq_ids:
            return
        for sequence in plan.left:
            self._computed.pop(sequence, None)
        for joined in plan.joined:
            self._computed[joined.seq_id] = joined.computed
        decodes = context = 0
        chunks = []
        for sequence, count in zip(plan.seq_ids, plan.new_tokens, strict=True):
            computed = self._computed[sequence]
            self._computed[sequence] = computed + count
            if count == 1:
                decodes += 1
                context += computed + 1
            else:
                chunks.append((count, computed))
        self._last = StepRows(decodes, context, tuple(chunks), len(plan.sampled))

    def collect(self) -> StepResult:
        """See Executor; but a failed step is an error: retries in smaller steps would have other shapes."""
        try:
            return self._executor.collect()
        except StepFailed as failure:
            raise RuntimeError(f"a step failed while it was measured: {failure}") from failure

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """See Executor."""
        return self._executor.ready(seq_ids)

    def arrivals(self) -> Sequence[Arrival]:
        """See Executor."""
        return self._executor.arrivals()

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """See Executor."""
        return self._executor.read_blocks(service, blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """See Executor."""
        self._executor.write_blocks(service, blocks, content)

    def close(self) -> None:
        """See Executor."""
        self._executor.close()

    def take(self) -> StepRows | None:
        """The shape of the plan submitted since the last call; None if there was none."""
        rows, self._last = self._last, None
        return rows


def profiling_options(options: EngineOptions) -> EngineOptions:
    """The options of an engine to measure: as configured, but waiting requests run at once, in order.

    There are no preemptions and no swap space: batches that do not fit are excluded.
    """
    scheduler = SchedulerOptions(
        order=Fcfs(),
        admission=Conservative(),
        preemption_mode="recompute",
        preempt_for_waiting="never",
        max_token_gap_s=1e9,
        max_running=options.scheduler.max_running,
        max_batched_tokens=options.scheduler.max_batched_tokens,
        depth=1,
        max_iterations=1,
    )
    return replace(options, scheduler=scheduler)


class Profiler:
    """Measures the services of an engine that was built with ``profiling_options``.

    recorder: the wrapper of the engine's executor (``wrap`` of ``build_engine``).
    """

    def __init__(self, engine: Engine, recorder: RowsRecorder, options: EngineOptions) -> None:
        self._engine = engine
        self._recorder = recorder
        self._max_running = options.scheduler.resolve_max_running(blocks=sys.maxsize)
        self._max_batched_tokens = options.scheduler.max_batched_tokens
        self._requests = self._prompts = 0

    def measure(
        self, service: str, info: ServiceInfo, grid: Grid, advance: Callable[[int, int], None]
    ) -> ServiceMeasurements:
        """Run ``grid`` on ``service``. advance: called with the numbers of finished and of all rounds.

        Raises ConfigError if no batch of the grid fits in the engine.
        """
        rounds = [r for r in grid.rounds(self._max_batched_tokens) if self._fits(r, info)]
        slices = [r for r in grid.slices() if self._fits(r, info)]
        if not rounds or not slices:
            raise ConfigError(
                f"{service}: no batch of the grid fits: a request can have {info.max_total_tokens} tokens, "
                f"the KV pool holds {info.kv_tokens}, {self._max_running} requests can run at once, and the "
                f"grid needs {min(batch_round.sequences for batch_round in grid.slices())} requests of "
                f"{grid.slice_prompt + grid.slice_tokens} tokens; "
                "raise --kv-memory, --max-running or the service's max_model_len"
            )
        done, total = 0, grid.repeats * len(rounds) + len(slices) + 2
        for warm_up in (
            min(rounds, key=attrgetter("prefill_tokens")),
            max(rounds, key=attrgetter("prefill_tokens")),
        ):
            self._run(service, info, warm_up)
            advance(done := done + 1, total)
        times: dict[tuple[StepRows, bool], list[float]] = defaultdict(list)
        # Repeats of a shape are far apart in time, so that a disturbance of the machine affects only one of
        # them.
        for _ in range(grid.repeats):
            for batch_round in rounds:
                for rows, seconds in pool_decodes(self._run(service, info, batch_round)):
                    times[rows, batch_round.equal] += seconds
                advance(done := done + 1, total)
        slice_samples = []
        for batch_round in slices:
            total_s = sum(seconds for _, seconds in self._run(service, info, batch_round))
            slice_samples.append(SliceSample(batch_round.prompts, batch_round.output_tokens, total_s))
            advance(done := done + 1, total)
        steps = tuple(
            Sample(rows, typical_seconds(seconds), equal) for (rows, equal), seconds in times.items()
        )
        prefill, decode = _padded_samples(steps, rounds)
        return ServiceMeasurements(
            steps=steps, prefill=tuple(prefill), decode=tuple(decode), slices=tuple(slice_samples)
        )

    def _fits(self, batch_round: BatchRound, info: ServiceInfo) -> bool:
        requests = batch_round.sequences + len(batch_round.joining)
        longest = (
            max((*batch_round.prompts, *(new.prompt_tokens for new in batch_round.joining)))
            + batch_round.output_tokens
        )
        return (
            requests <= self._max_running
            and longest <= info.max_total_tokens
            and requests * longest <= info.kv_tokens
        )

    def _run(self, service: str, info: ServiceInfo, batch_round: BatchRound) -> list[tuple[StepRows, float]]:
        """Run one round; returns its steps with their seconds. A prompt joins in every second step."""
        prompts = [self._prompt(info, tokens) for tokens in batch_round.prompts]
        for prompt in prompts:
            self._submit(service, prompt, batch_round.output_tokens)
        longest = max(prompts, key=len)
        joining = list(batch_round.joining)
        starts: list[int] = []
        steps: list[StepRows] = []
        while self._engine.busy:
            if joining and steps and len(steps) % 2 == 0:
                new = joining.pop(0)
                prompt = longest[: new.shared] + self._prompt(info, new.prompt_tokens)
                self._submit(
                    service, prompt[: new.prompt_tokens], max(2, batch_round.output_tokens - len(steps))
                )
            started = self._engine.now_ns()
            self._engine.step()
            rows = self._recorder.take()
            if rows is None:
                if self._engine.idle:
                    raise RuntimeError(f"{service}: requests are unfinished, but the scheduler waits")
                continue
            starts.append(started)
            steps.append(rows)
        starts.append(self._engine.now_ns())
        times = [(after - before) / 1e9 for before, after in pairwise(starts)]
        return list(zip(steps, times, strict=True))

    def _prompt(self, info: ServiceInfo, tokens: int) -> list[int]:
        """A unique prompt, of which nothing is in the prefix cache."""
        self._prompts += 1
        return [derive_seed(self._prompts, position) % info.vocab_size for position in range(tokens)]

    def _submit(self, service: str, prompt: list[int], output_tokens: int) -> None:
        self._requests += 1
        request = Request(
            id=f"profile-{self._requests}",
            service=service,
            prompt=prompt,
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            arrival_ns=self._engine.now_ns(),
        )
        self._engine.submit(request)


def typical_seconds(seconds: Sequence[float]) -> float:
    """The mean of the times near their median: jitter counts, as in serving; disturbances do not."""
    middle = median_low(seconds)
    return fmean(duration for duration in seconds if abs(duration - middle) <= JITTER * middle)


def pool_decodes(steps: Sequence[tuple[StepRows, float]]) -> list[tuple[StepRows, list[float]]]:
    """Steps with their times; consecutive decode steps of the same batch size are pooled in windows."""

    def kind(step: tuple[StepRows, float]) -> int:
        return 0 if step[0].chunks else step[0].decodes

    pooled = []
    for sequences, run in groupby(steps, kind):
        steps_of_kind = list(run)
        width = DECODE_WINDOW if sequences else 1
        for start in range(0, len(steps_of_kind), width):
            window = steps_of_kind[start : start + width]
            pooled.append((window[len(window) // 2][0], [seconds for _, seconds in window]))
    return pooled


def _padded_samples(
    steps: Sequence[Sample], rounds: Sequence[BatchRound]
) -> tuple[list[PaddedSample], list[PaddedSample]]:
    """The steps that are a whole prefill, or one decode iteration, of a round of equal prompts."""
    known = {sample.shape: sample.seconds for sample in steps if sample.equal}
    prefill, decode = {}, {}
    for batch_round in rounds:
        if not batch_round.equal:
            continue
        size, prompt = batch_round.sequences, batch_round.prompts[0]
        seconds = known.get(StepShape.equal_rows(size, prompt, 0))
        if seconds is not None:
            prefill[size, prompt] = PaddedSample(size, prompt, seconds)
        for context in range(prompt, prompt + batch_round.output_tokens - 1):
            seconds = known.get(StepShape.equal_rows(size, 1, context))
            if seconds is not None:
                decode[size, context + 1] = PaddedSample(size, context + 1, seconds)
    return list(prefill.values()), list(decode.values())
