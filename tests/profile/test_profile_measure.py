"""Profiling of an executor with known step times on a fake clock: the fits must find its costs."""

from dataclasses import asdict, replace

import pytest
from engine_builders import FakeExecutor, build_fake, make_options, make_request, run_all

from shoal.core import ConfigError
from shoal.engine.core import Engine
from shoal.forecast import FittedTimes, LatencyModel, StepRows, StepShape
from shoal.profile.fit import fit_service, slice_seconds
from shoal.profile.grid import GRIDS, Grid, JoiningPrompt, uneven_prompts
from shoal.profile.measure import Profiler, RowsRecorder, pool_decodes, profiling_options, typical_seconds
from shoal.schedule import Conservative, Fcfs

TRUTH = LatencyModel(constant_s=2e-2, sequence_s=5e-4, token_s=1.5e-3, context_s=4e-6, work_s=6e-7)
GRID = Grid(
    batches=(1, 2, 4),
    prompts=(8, 24, 60),
    max_tokens=130,
    decode_steps=9,
    uneven=((2, 20), (6, 16)),
    prefills=(4, 50),
    mixed=((2, 20, (JoiningPrompt(16),)), (4, 24, (JoiningPrompt(30), JoiningPrompt(40, 16)))),
    repeats=3,
    slice_batches=(3,),
    uneven_slices=(5,),
    slice_prompt=20,
    slice_tokens=64,
)


class TimedExecutor(FakeExecutor):
    """Advances the clock by the true time of each step; every ``disturbed``-th step is slow."""

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
        fake, self.info = build_fake(self.options, {})
        self.executor = TimedExecutor(fake.fake_executor.layout, disturbed=disturbed)
        self.recorder = RowsRecorder(self.executor)
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


def test_fits_find_the_costs_of_the_executor():
    bench = Bench()
    measured = bench.measure()
    fit = fit_service(measured)
    assert asdict(fit.step) == pytest.approx(asdict(TRUTH), rel=1e-4)
    assert fit.step_report.mean_absolute_percent_error < 0.01
    check, uneven = fit.slices
    assert (check.sequences, check.prompt_tokens, check.output_tokens) == (3, 20, 64)
    assert (uneven.sequences, uneven.output_tokens, uneven.equal) == (5, 64, False)
    assert uneven.prompt_tokens == pytest.approx(20, abs=2)
    assert uneven.padded_error is None
    truth_s = slice_seconds(FittedTimes(TRUTH), uneven_prompts(5, 20), 64)
    assert uneven.measured_s == pytest.approx(truth_s, rel=1e-6)
    for one in fit.slices:
        assert one.curve_error == pytest.approx(0, abs=1e-3)
    assert check.measured_s == pytest.approx(TRUTH.slice_time(3, 20, 64), rel=1e-6)
    assert check.step_error == pytest.approx(0, abs=1e-4)
    assert check.padded_error == pytest.approx(0, abs=0.02)
    assert fit.decode_report.mean_absolute_percent_error < 0.01
    assert not bench.engine.busy
    assert bench.pool.live_blocks("a") == 0


def test_the_grid_is_measured_where_it_fits():
    bench = Bench()
    measured = bench.measure()
    expected = {(n, p) for n in GRID.batches for p in GRID.prompts if n * p <= GRID.max_tokens}
    assert {(s.sequences, s.length) for s in measured.prefill} == expected
    assert {(s.sequences, s.length) for s in measured.decode} >= {(n, p + 5) for n, p in expected}
    for sample in measured.prefill:
        shape = StepShape.equal_rows(sample.sequences, sample.length, 0)
        assert sample.seconds == pytest.approx(TRUTH.step_time(shape), rel=1e-6)
    alone = {s.rows.chunks for s in measured.steps if not s.equal and len(s.rows.chunks) == 1}
    assert alone >= {((4, 0),), ((50, 0),)}
    uneven = {tuple((n, 0) for n in uneven_prompts(*one)) for one in GRID.uneven}
    assert uneven <= {s.rows.chunks for s in measured.steps if not s.equal}
    mixed = {(s.rows.decodes, s.rows.chunks) for s in measured.steps if s.rows.decodes and s.rows.chunks}
    assert mixed == {(2, ((16, 0),)), (4, ((30, 0),)), (5, ((24, 16),))}, "16 of 40 tokens were shared"
    done, totals = zip(*bench.progress, strict=True)
    assert list(done) == list(range(1, len(done) + 1))
    assert set(totals) == {done[-1]}


def test_batches_that_do_not_fit_are_excluded():
    bench = Bench("fake?context=100", scheduler={"max_running": 2})
    measured = bench.measure(replace(GRID, slice_batches=(1, 8), uneven_slices=()))
    assert max(s.sequences for s in measured.prefill) == 2
    assert max(s.shape.sequences for s in measured.steps) == 2
    assert [s.prompts for s in measured.slices] == [(20,)]


def test_an_engine_without_room_for_any_batch_is_an_error():
    bench = Bench("fake?context=16")
    with pytest.raises(ConfigError, match=r"a: no batch of the grid fits: a request can have 16 tokens"):
        bench.measure()


def test_disturbed_steps_do_not_change_medians():
    fit = fit_service(Bench(disturbed=11).measure())
    assert asdict(fit.step) == pytest.approx(asdict(TRUTH), rel=0.02)


def test_services_are_measured_one_by_one():
    bench = Bench("fake", "fake")
    first, second = bench.measure(service="a"), bench.measure(service="b")
    assert {s.rows for s in first.steps} == {s.rows for s in second.steps}


def test_the_recorder_has_the_shapes_of_executed_steps():
    """Chunks, prefix hits, and sequences that join and leave."""
    bench = Bench(scheduler={"max_batched_tokens": 16})
    seen = []
    for count in range(3):
        for name in range(count + 1):
            bench.engine.submit(make_request(f"r{count}-{name}", prompt=list(range(40)), max_tokens=4 + name))
        while bench.engine.busy:
            bench.engine.step()
            seen.append(bench.recorder.take())
    assert [rows.shape for rows in seen if rows] == bench.executor.shapes
    assert bench.recorder.take() is None
    assert any(shape.new_tokens < 40 and shape.prefill_work > 16 * 17 // 2 for shape in bench.executor.shapes)


def test_consecutive_decode_steps_are_pooled_around_their_middle():
    prefill = [(StepRows(0, 0, ((10, 0), (10, 0)), 2), 1.0)]
    decodes = [(StepRows(2, 2 * (11 + i), (), 2), 0.1 * i) for i in range(11)]
    mixed = [(StepRows(2, 62, ((8, 0),), 3), 2.0)]
    three = [(StepRows(3, 123, (), 3), 3.0)]
    assert pool_decodes(prefill + decodes + mixed + three) == [
        (prefill[0][0], [1.0]),
        (decodes[4][0], [seconds for _, seconds in decodes[:9]]),
        (decodes[10][0], [seconds for _, seconds in decodes[9:]]),
        (mixed[0][0], [2.0]),
        (three[0][0], [3.0]),
    ]


def test_jitter_counts_and_disturbances_do_not():
    assert typical_seconds([1.0, 1.1, 1.2]) == pytest.approx(1.1)
    assert typical_seconds([1.0, 9.0, 1.2, 1.1]) == pytest.approx(1.1)
    assert typical_seconds([1.0, 9.0]) == 1.0


@pytest.mark.parametrize(("batch", "mean"), [(1, 50), (2, 48), (8, 120), (32, 30)])
def test_uneven_prompts_differ_around_their_mean(batch, mean):
    lengths = uneven_prompts(batch, mean)
    assert list(lengths) == sorted(lengths)
    assert len(lengths) == batch
    assert sum(lengths) / batch == pytest.approx(mean, rel=0.1)
    assert batch == 1 or max(lengths) > 2 * min(lengths)


def test_a_profiled_engine_runs_one_plan_at_a_time():
    options = make_options(scheduler={"depth": 2, "max_running": 7, "max_batched_tokens": 99})
    scheduler = profiling_options(options).scheduler
    assert (scheduler.depth, scheduler.max_running, scheduler.max_batched_tokens) == (1, 7, 99)
    assert (scheduler.order, scheduler.admission) == (Fcfs(), Conservative())
    assert scheduler.preemption_mode == "recompute", "no host memory is to be taken"
    assert scheduler.preempt_for_waiting == "never"
    assert profiling_options(options).kv_cache == options.kv_cache


@pytest.mark.parametrize("name", GRIDS)
def test_grids_distinguish_the_costs(name):
    """Every grid varies batch, prompt and context, and has slices that are not fitted."""
    assert all(
        new.shared < new.prompt_tokens and new.shared <= max(uneven_prompts(batch, mean))
        for batch, mean, joining in GRIDS[name].mixed
        for new in joining
    )
    grid = GRIDS[name]
    assert len(grid.batches) >= 3
    assert len(grid.prompts) >= 3
    assert grid.slice_prompt not in grid.prompts
    assert grid.slice_tokens == 128
    assert any(batch * prompt <= grid.max_tokens for batch in grid.batches[1:] for prompt in grid.prompts[1:])


def test_the_engine_serves_requests_after_a_profile():
    bench = Bench()
    bench.measure(replace(GRID, batches=(1,), mixed=(), uneven=(), repeats=1))
    bench.engine.submit(make_request("later"))
    assert run_all(bench.engine)["later"][-1].finish is not None
