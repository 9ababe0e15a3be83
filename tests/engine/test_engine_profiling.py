"""Profiling: an executor with a known step time on a clock of its own, whose costs must be found again."""

from dataclasses import asdict, replace

import pytest
from engine_builders import FakeExecutor, build_fake, make_options, make_request, run_all

from shoal.core import ConfigError
from shoal.engine.core import Engine
from shoal.engine.profiling import Profiler, ShapeRecorder, pool_decodes, profiling_options
from shoal.engine.profiling_fit import fit_service
from shoal.engine.profiling_grid import GRIDS, Grid
from shoal.forecast import LatencyModel, StepShape
from shoal.schedule import Conservative, Fcfs

TRUTH = LatencyModel(constant_s=2e-2, sequence_s=5e-4, token_s=1.5e-3, context_s=4e-6, work_s=6e-7)
GRID = Grid(
    batches=(1, 2, 4),
    prompts=(8, 24, 60),
    most_tokens=130,
    decode_steps=9,
    mixed=((2, 8, 16), (4, 12, 30)),
    repeats=3,
    slice_batches=(3,),
    slice_prompt=20,
    slice_tokens=64,
)


class TimedExecutor(FakeExecutor):
    """Moves the clock by the true time of what it really computes; every ``disturbed`` step is slow."""

    def __init__(self, layout, truth=TRUTH, disturbed=0):
        super().__init__(layout)
        self.truth, self.disturbed = truth, disturbed
        self.now_ns = 0
        self.rows, self.shapes = [], []

    def _compute(self, service, sequence, count):
        self.rows.append((count, sequence.computed))
        super()._compute(service, sequence, count)

    def collect(self):
        self.rows = []
        result = super().collect()
        self.shapes.append(StepShape.of(self.rows))
        slow = 9 if self.disturbed and self.steps % self.disturbed == 0 else 1
        self.now_ns += round(slow * self.truth.step_time(self.shapes[-1]) * 1e9)
        return result


class Bench:
    """A fake engine around a TimedExecutor."""

    def __init__(self, *models, disturbed=0, **options):
        self.options = profiling_options(make_options(*models, **({"blocks": 400} | options)))
        fake, self.info = build_fake(self.options, {}, in_process=False)
        self.executor = TimedExecutor(fake.fake_executor.layout, disturbed=disturbed)
        self.recorder = ShapeRecorder(self.executor)
        self.pool = fake.fake_pool
        self.engine = Engine(fake._scheduler, self.pool, self.recorder, clock=lambda: self.executor.now_ns)
        self.progress = []

    def measure(self, grid=GRID, service="a"):
        profiler = Profiler(self.engine, self.recorder, self.options)
        return profiler.measure(
            service,
            replace(self.info.services[service], vocab_size=256),  # the fake model fails on a token above
            grid,
            lambda *done: self.progress.append(done),
        )


def test_the_costs_of_the_executor_are_found():
    bench = Bench()
    measured = bench.measure()
    fit = fit_service(measured)
    assert asdict(fit.step) == pytest.approx(asdict(TRUTH), rel=1e-4)
    assert fit.step_report.mean_absolute_percent_error < 0.01
    [check] = fit.slices
    assert (check.sequences, check.prompt_tokens, check.output_tokens) == (3, 20, 64)
    assert check.measured_s == pytest.approx(TRUTH.slice_time(3, 20, 64), rel=1e-6)
    assert check.step_error == pytest.approx(0, abs=1e-4)
    assert check.padded_error == pytest.approx(0, abs=0.02)
    assert fit.decode_report.mean_absolute_percent_error < 0.01
    assert not bench.engine.busy
    assert bench.pool.live_blocks("a") == 0


def test_the_grid_is_measured_where_it_fits():
    bench = Bench()
    measured = bench.measure()
    expected = {(n, p) for n in GRID.batches for p in GRID.prompts if n * p <= GRID.most_tokens}
    expected |= {(2, 8), (4, 12)}
    assert {(s.sequences, s.length) for s in measured.prefill} == expected
    middles = {(n, p + 5) for n, p in expected} - {(4, 12 + 5)}
    assert {(s.sequences, s.length) for s in measured.decode} >= middles
    for sample in measured.prefill:
        shape = StepShape.equal_rows(sample.sequences, sample.length, 0)
        assert sample.seconds == pytest.approx(TRUTH.step_time(shape), rel=1e-6)
    mixed = [s for s in measured.steps if s.shape.decode_context and s.shape.prefill_work]
    assert {s.shape.sequences for s in mixed} == {3, 5}
    done, totals = zip(*bench.progress, strict=True)
    assert list(done) == list(range(1, len(done) + 1))
    assert set(totals) == {done[-1]}


def test_what_the_engine_cannot_hold_is_left_out():
    bench = Bench("fake?context=100", scheduler={"max_running": 2})
    measured = bench.measure(replace(GRID, slice_batches=(1, 8)))
    assert max(s.sequences for s in measured.prefill) == 2
    assert max(s.shape.sequences for s in measured.steps) == 2
    assert [s.sequences for s in measured.slices] == [1]


def test_an_engine_that_can_hold_nothing_is_told_why():
    bench = Bench("fake?context=16")
    with pytest.raises(ConfigError, match=r"a: no batch of the grid fits: a request can have 16 tokens"):
        bench.measure()


def test_medians_are_deaf_to_disturbed_steps():
    fit = fit_service(Bench(disturbed=11).measure())
    assert asdict(fit.step) == pytest.approx(asdict(TRUTH), rel=0.02)


def test_services_are_measured_one_by_one():
    bench = Bench("fake", "fake")
    first, second = bench.measure(service="a"), bench.measure(service="b")
    assert {s.shape for s in first.steps} == {s.shape for s in second.steps}


def test_the_recorder_sees_what_the_executor_computes():
    """Chunks, prefix hits, and sequences that join and leave."""
    bench = Bench(scheduler={"max_batched_tokens": 16})
    seen = []
    for count in range(3):
        for name in range(count + 1):
            bench.engine.submit(make_request(f"r{count}-{name}", prompt=list(range(40)), max_tokens=4 + name))
        while bench.engine.busy:
            bench.engine.step()
            seen.append(bench.recorder.take())
    assert [shape for shape in seen if shape] == bench.executor.shapes
    assert bench.recorder.take() is None
    assert any(shape.new_tokens < 40 and shape.prefill_work > 16 * 17 // 2 for shape in bench.executor.shapes)


def test_decode_steps_in_a_row_are_pooled_around_their_middle():
    prefill = [(StepShape.equal_rows(2, 10, 0), 1.0)]
    decodes = [(StepShape.equal_rows(2, 1, 10 + i), 0.1 * i) for i in range(11)]
    mixed = [(StepShape.of([(1, 30), (1, 30), (8, 0)]), 2.0)]
    three = [(StepShape.equal_rows(3, 1, 40), 3.0)]
    assert pool_decodes(prefill + decodes + mixed + three) == [
        (prefill[0][0], [1.0]),
        (decodes[4][0], [seconds for _, seconds in decodes[:9]]),
        (decodes[10][0], [seconds for _, seconds in decodes[9:]]),
        (mixed[0][0], [2.0]),
        (three[0][0], [3.0]),
    ]


def test_the_engine_to_be_measured_runs_one_plan_at_a_time():
    options = make_options(scheduler={"depth": 2, "max_running": 7, "max_batched_tokens": 99})
    scheduler = profiling_options(options).scheduler
    assert (scheduler.depth, scheduler.max_running, scheduler.max_batched_tokens) == (1, 7, 99)
    assert (scheduler.order, scheduler.admission) == (Fcfs(), Conservative())
    assert (scheduler.eviction, scheduler.preempt) == ("recompute", False), "no host memory is to be taken"
    assert profiling_options(options).kv_cache == options.kv_cache


@pytest.mark.parametrize("name", GRIDS)
def test_grids_can_tell_the_costs_apart(name):
    """Every grid varies batch, prompt and context, and checks slices that its fits have not seen."""
    grid = GRIDS[name]
    assert len(grid.batches) >= 3
    assert len(grid.prompts) >= 3
    assert grid.slice_prompt not in grid.prompts
    assert grid.slice_tokens == 128
    assert any(
        batch * prompt <= grid.most_tokens for batch in grid.batches[1:] for prompt in grid.prompts[1:]
    )


def test_other_requests_of_the_engine_go_on_afterwards():
    bench = Bench()
    bench.measure(replace(GRID, batches=(1,), mixed=(), repeats=1))
    bench.engine.submit(make_request("later"))
    assert run_all(bench.engine)["later"][-1].finish is not None
