"""Orders, admissions and victims: which requests step first, are admitted, are preempted."""

import numpy as np
import pytest
from schedule_builders import make_pool, make_request, make_scheduler, make_state, run

from shoal.core import ConfigError, Idle, StepPlan, StepResult, derive_seed
from shoal.forecast import LengthHistory
from shoal.schedule import (
    ADMISSIONS,
    VICTIMS,
    Aggressive,
    Conservative,
    Decision,
    MemoryPressure,
    Oracle,
    PastFuture,
    Predicted,
    SchedulerOptions,
    Slice,
    Turn,
    admission_class,
)
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.policies.orders import MAX_DELAY_STEPS, Fcfs, order_class
from shoal.schedule.policies.victims import (
    FewestTokens,
    LargeYoung,
    LowestPriority,
    Newest,
    SmallestThatFits,
)
from shoal.schedule.running_batch import RequestTable

TWO = {"a": 1, "b": 1}


def services(done):
    return "".join(plan.service for plan in done.plans)


def forecast_of(pool, *shapes, history=None, service="a"):
    """Running requests of (prompt, generated, most output tokens), and their memory."""
    requests = []
    for number, (prompt, generated, most) in enumerate(shapes):
        request = make_state(number=number, prompt=prompt, generated=generated, max_new_tokens=most)
        request.seq_id = number
        request.block_ids = list(range(-(-request.num_tokens // pool.block_size)))
        requests.append(request)
    history = history or LengthHistory(1_000)
    table = RequestTable(requests)
    layout = pool.layout.services[service]
    return MemoryForecast(
        layout, pool.block_size, table, None, lambda: history.distribution(table.num_generated)
    )


# Orders


def test_fcfs_prefills_the_oldest_then_decodes_in_turn():
    scheduler = make_scheduler(make_pool(per_merged=TWO))
    requests = [make_request(3, 4, service=name) for name in "ba"]
    assert services(run(scheduler, requests)) == "ba" + "ba" * 3


def test_fcfs_strict_serves_the_service_of_the_oldest():
    scheduler = make_scheduler(make_pool(per_merged=TWO), order="fcfs-strict")
    requests = [make_request(3, 4, service=name) for name in "ba"]
    assert services(run(scheduler, requests)) == "bbbbaaaa"


def test_a_head_that_does_not_fit_holds_up_its_own_service_only():
    scheduler = make_scheduler(make_pool(6, per_merged=TWO))
    requests = [
        make_request(8, 6, service="a"),
        make_request(20, 2, service="a", id="large"),
        make_request(3, 2, service="a", id="behind"),
        make_request(3, 2, service="b", id="other"),
    ]
    done = run(scheduler, requests)
    assert services(done)[:2] == "ab"
    assert list(done.ends) == ["other", requests[0].id, "large", "behind"]


def test_prompts_of_one_service_do_not_stop_the_decodes_of_another():
    scheduler = make_scheduler(make_pool(per_merged=TWO))
    scheduler.submit(make_request(3, 3, service="b", id="decode"), 0)

    def before_step(step, done):
        if "decode" not in done.ends:
            scheduler.submit(make_request(3, 1, service="a"), 0)

    done = run(scheduler, before_step=before_step)
    gaps = np.diff([plan.number for plan in done.plans if plan.service == "b"])
    assert gaps.tolist() == [MAX_DELAY_STEPS + 1] * 2


def test_an_order_can_wait_and_select_requests():
    """An order may select requests by its own priorities, and set a time for the next decision."""

    class ShortestPromptAtNoon(Fcfs):
        def decide(self, view, now_ns):
            if now_ns < 12:
                return Decision((), until_ns=12)
            waiting = sorted(view.services["a"].waiting, key=lambda request: request.num_prompt_tokens)
            return Decision([Turn("a", waiting=waiting)])

    scheduler = make_scheduler(order=ShortestPromptAtNoon(), max_running=1)
    for length in (9, 3, 6):
        scheduler.submit(make_request(length, 1, id=f"{length}"), 0)
    assert scheduler.schedule(0) == Idle(12)
    ends = []
    while scheduler.unfinished:
        plan = scheduler.schedule(12)
        ends += [event.request_id for event in scheduler.update(plan, StepResult.of_step([7], 1), 12)]
    assert ends == ["3", "6", "9"]


# Admissions


def test_conservative_adds_up_maximum_outputs():
    pool = make_pool(10)
    forecast = forecast_of(pool, (6, 2, 7), (3, 0, 10))
    # 6 + 7 - 1 tokens are 3 blocks, 3 + 10 - 1 are 3: the last token of an output is never stored.
    assert Conservative().demand([forecast]) == 6
    assert Conservative().fits([forecast], 6)
    assert not Conservative().fits([forecast], 5)
    assert Conservative(overcommit=1.2).fits([forecast], 5)


def test_aggressive_counts_known_tokens():
    pool = make_pool(10)
    forecast = forecast_of(pool, (6, 2, 7), (3, 0, 10))
    assert Aggressive().demand([forecast]) == 2 + 1
    assert Aggressive(watermark=0.75).fits([forecast], 4)
    assert not Aggressive(watermark=0.7).fits([forecast], 4)


def test_oracle_foresees_which_request_ends_first():
    pool = make_pool(10, block_size=1)
    forecast = forecast_of(pool, (10, 0, 5), (1, 0, 20))
    assert Oracle().demand([forecast]) == max(10 + 4 + 1 + 4, 1 + 19)
    assert Conservative().demand([forecast]) == 10 + 4 + 1 + 19


def test_past_future_is_the_mean_or_the_largest_of_its_draws():
    pool = make_pool(10, block_size=1)
    history = LengthHistory(1_000, window=2)
    history.record(10)
    history.record(30)
    forecast = forecast_of(pool, (5, 0, 100), history=history)
    seed = np.array([derive_seed(0, 0)], dtype=np.uint64)
    lengths = forecast.lengths.draw(seed, np.array([0]), np.array([100]), 10)[:, 0]
    assert set(lengths.tolist()) == {10, 30}
    assert PastFuture().demand([forecast]) == pytest.approx(np.mean(5 + lengths - 1))
    forecast = forecast_of(pool, (5, 0, 100), history=history)
    assert PastFuture(draws="max").demand([forecast]) == max(5 + lengths[:5] - 1)
    assert PastFuture(reserved=0.25).limit(100) == 75


def test_several_services_need_the_sum_of_their_peaks():
    pool = make_pool(20, per_merged={"a": 1, "b": 3})
    a = forecast_of(pool, (8, 0, 1))
    b = forecast_of(pool, (16, 0, 1), service="b")
    assert Oracle().demand([a, b]) == 2 + 2


def test_shared_prefixes_count_once():
    """Three requests of 5 blocks share 4: 7 blocks in all, where 15 would not fit into 8."""
    scheduler = make_scheduler(make_pool(9), admission=Conservative())
    prompt = list(range(16))
    first = make_request([*prompt, 1], None, id="first", max_tokens=4)
    others = [make_request([*prompt, number], None, max_tokens=4) for number in (2, 3)]
    scheduler.submit(first, 0)
    plan = scheduler.schedule(0)
    scheduler.update(plan, StepResult.of_step([7], 1), 0)
    for request in others:
        scheduler.submit(request, 0)
    plan = scheduler.schedule(0)
    assert isinstance(plan, StepPlan)
    assert [joined.computed for joined in plan.joined] == [16, 16]


def test_admission_is_tried_every_so_many_steps_and_whenever_nothing_runs():
    scheduler = make_scheduler(admission=Aggressive(admit_every=4))
    scheduler.submit(make_request(3, 8), 0)

    def before_step(step, done):
        if step == 1:
            scheduler.submit(make_request(3, 2, id="late"), 0)

    done = run(scheduler, before_step=before_step)
    assert [plan.number for plan in done.plans if plan.joined] == [0, 4]
    scheduler = make_scheduler(admission=Aggressive(admit_every=4), max_running=1)
    done = run(scheduler, [make_request(3, 2), make_request(3, 2)])
    assert [plan.number for plan in done.plans if plan.joined] == [0, 2]


def test_an_idle_engine_admits_its_first_request_whatever_the_admission_says():
    scheduler = make_scheduler(make_pool(5), admission=Aggressive(watermark=0.1))
    done = run(scheduler, [make_request(12, 2), make_request(3, 2)])
    assert [plan.number for plan in done.plans if plan.joined] == [0, 2]


def test_looking_again_changes_nothing():
    scheduler = make_scheduler(make_pool(4), depth=2, admission=PastFuture())
    for number in range(4):
        scheduler.submit(make_request([1] * 4 + [number], 4), 0)
    plan = scheduler.schedule(0)
    scheduler.schedule(0)
    before = scheduler.stats()
    for _ in range(5):
        assert scheduler.schedule(0) == Idle()
    assert scheduler.stats() == before
    assert isinstance(plan, StepPlan)


# Victims


def pressure_on(forecast, capacity=9, keys=None):
    """All requests are candidates; without ``keys`` the order is first come, first served."""
    wanted = forecast.table.number if keys is None else np.array(keys)
    return MemoryPressure(forecast.table, {"a": forecast}, capacity, lambda: wanted.astype(np.float64))


def test_newest_is_the_last_admitted():
    forecast = forecast_of(make_pool(), (4, 1, 9), (9, 1, 9), (2, 1, 9))
    assert Newest().choose(pressure_on(forecast)) is forecast.table.requests[2]


def test_lowest_priority_is_the_least_urgent_of_the_order():
    forecast = forecast_of(make_pool(), (4, 1, 9), (9, 1, 9), (2, 1, 9))
    requests = forecast.table.requests
    assert LowestPriority().choose(pressure_on(forecast)) is requests[2]
    assert LowestPriority().choose(pressure_on(forecast, keys=[3.0, 7.0, 7.0])) is requests[2]
    assert LowestPriority().choose(pressure_on(forecast, keys=[8.0, 7.0, 7.0])) is requests[0]


def test_fewest_tokens_loses_least():
    forecast = forecast_of(make_pool(), (4, 1, 9), (9, 1, 9), (2, 1, 9))
    forecast.table.num_computed[:] = (5, 3, 3)
    assert FewestTokens().choose(pressure_on(forecast)) is forecast.table.requests[2]
    forecast.table.num_computed[0] = 2
    assert FewestTokens().choose(pressure_on(forecast)) is forecast.table.requests[0]


def test_large_young_takes_the_largest_below_the_mean_length():
    history = LengthHistory(1_000, window=1)
    history.record(20)
    forecast = forecast_of(make_pool(), (40, 16, 90), (20, 15, 90), (4, 1, 90), history=history)
    requests = forecast.table.requests
    assert LargeYoung().choose(pressure_on(forecast)) is requests[1]
    requests[1].num_preemptions = 1
    assert LargeYoung().choose(pressure_on(forecast)) is requests[2]
    requests[2].num_preemptions = 1
    assert LargeYoung().choose(pressure_on(forecast)) is requests[2]


def test_smallest_that_fits_frees_just_enough():
    history = LengthHistory(1_000, window=1)
    history.record(11)
    shapes = (30, 1, 90), (5, 1, 90), (12, 1, 90)
    forecast = forecast_of(make_pool(block_size=1), *shapes, history=history)
    # Each stores 9 tokens more: 40 + 15 + 22 = 77 at the end.
    chosen = [SmallestThatFits().choose(pressure_on(forecast, capacity)) for capacity in (62, 61, 54, 30)]
    assert [request.number for request in chosen] == [1, 2, 0, 0]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_preempted_request_goes_on_where_it_was(victim):
    scheduler = make_scheduler(make_pool(5, prefix_caching=False), victim=victim)
    requests = [make_request(7, 8, id="x"), make_request(6, 8, id="y")]
    done = run(scheduler, requests)
    alone = run(make_scheduler(), requests)
    assert scheduler.stats().services["a"].preemptions > 0
    assert done.tokens == alone.tokens


# Names and options


def test_names_are_looked_up_with_a_hint():
    with pytest.raises(ConfigError, match=r"did you mean 'past-future'.*aggressive, batch, conservative"):
        admission_class("past-futur")
    with pytest.raises(ConfigError, match="order 'lifo' is not known; possible are doubling-budget, edf"):
        order_class("lifo")
    with pytest.raises(ConfigError, match=r"victim 'oldest'.*newest"):
        SchedulerOptions(victim="oldest")
    assert admission_class("oracle") is ADMISSIONS["oracle"] is Oracle


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerOptions(max_running=0), "max_running must be at least 1, got 0"),
        (lambda: SchedulerOptions(max_batched_tokens=0), "max_batched_tokens"),
        (lambda: SchedulerOptions(preemption_mode="forget"), "recompute or swap, got 'forget'"),
        (lambda: SchedulerOptions(starvation_s=0.0), "starvation must be above 0"),
        (lambda: SchedulerOptions(lengths="guess"), "lengths 'guess' is not known"),
        (lambda: Slice(tokens=0), "tokens must be at least 1"),
        (lambda: Predicted(reserved=-0.1), "reserved must be in"),
        (lambda: SchedulerOptions(depth=3), "1 or 2 plans in flight, got 3"),
        (lambda: Conservative(overcommit=0), "overcommit must be above 0"),
        (lambda: Conservative(admit_every=0), "admit_every"),
        (lambda: Aggressive(watermark=1.1), "watermark"),
        (lambda: PastFuture(reserved=1.0), "reserved"),
        (lambda: PastFuture(window=0), "window"),
        (lambda: PastFuture(cold_start="warm"), "kaplan-meier, max, got 'warm'"),
        (lambda: PastFuture(draws="median"), "mean, max"),
    ],
)
def test_invalid_options_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
