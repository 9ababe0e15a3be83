"""Waiting requests whose SLO has expired: served, put last or refused (on_hopeless)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import SECOND, STEP_NS, make_pool, make_request, make_scheduler, make_state, run
from test_schedule_random import ADMISSION_POINTS, ORDER_POINTS, PREEMPTIONS, serve, workloads

from hypothesis_profiles import examples
from shoal.core import SLO, ConfigError, FinishReason, RequestRecord, StepPlan, StepResult, met
from shoal.schedule import EarliestDeadline, SchedulerOptions
from shoal.schedule.slo_expired import slo_expired_ns
from shoal.schedule.waiting_queue import WaitingQueue

STEP_S = STEP_NS / SECOND
# Between ends of steps, so that a nanosecond more or less does not matter.
GOALS = st.sampled_from([None, 0.4 * STEP_S, 1.4 * STEP_S, 4.4 * STEP_S, 15.4 * STEP_S, 50.4 * STEP_S])
NO_STARVATION = [options for options in PREEMPTIONS if "starvation_s" not in options]


def can_meet_slo(request, now_ns):
    """Whether a waiting request can still meet its goals, if its next token came now and were its last."""
    begun = request.num_generated > 0
    first_ns = request.first_token_ns if begun else now_ns
    gap_ns = max(request.largest_gap_ns, now_ns - request.last_token_ns) if begun else 0
    records = (
        RequestRecord(
            request_id="",
            service="",
            arrival_ns=request.arrival_ns,
            first_token_ns=first_ns,
            finish_ns=now_ns,
            prompt_tokens=1,
            output_tokens=tokens,
            largest_gap_ns=gap_ns,
        )
        for tokens in range(request.num_generated + 1, request.max_new_tokens + 1)
    )
    return any(met(record, request.slo) is not False for record in records)


@settings(max_examples=examples(300), deadline=None)
@given(
    goals=st.fixed_dictionaries(
        dict.fromkeys(("ttft_s", "tpot_s", "mtpot_s", "e2e_s"), st.none() | st.floats(1e-9, 50))
    ),
    arrival_ns=st.integers(0, 10**12),
    longest=st.integers(2, 40),
    data=st.data(),
)
def test_an_slo_has_expired_when_no_schedule_can_meet_it(goals, arrival_ns, longest, data):
    request = make_state(max_new_tokens=longest, slo=SLO(**goals))
    request.request = replace(request.request, arrival_ns=arrival_ns)
    request.num_generated = data.draw(st.integers(0, longest - 1))
    earliest_ns = arrival_ns
    if request.num_generated:
        request.first_token_ns = arrival_ns + data.draw(st.integers(1, 60 * SECOND))
        request.largest_gap_ns = 0
        if request.num_generated > 1:
            request.largest_gap_ns = data.draw(st.integers(1, 60 * SECOND))
        decoding_ns = request.largest_gap_ns * min(request.num_generated - 1, 3)
        earliest_ns = request.last_token_ns = request.first_token_ns + decoding_ns
    since_ns = slo_expired_ns(request)
    if since_ns is None:
        assert can_meet_slo(request, earliest_ns + 10**6 * SECOND)
        return
    # Times are whole nanoseconds, and goals may be fractions of one.
    assert not can_meet_slo(request, max(since_ns, earliest_ns))
    if since_ns - 2 >= earliest_ns:
        assert can_meet_slo(request, since_ns - 2)


class AdmissionWatcher:
    """Checks every decision: which requests were admitted, refused, or still wait."""

    def __init__(self, mode):
        self.mode = mode
        self.num_admitted_late = 0

    def watch(self, scheduler):
        self.schedule = scheduler.schedule
        self.scheduler = scheduler
        scheduler.schedule = self.checked

    def checked(self, now_ns):
        states = self.scheduler.services.values()
        before = {
            request: (can_meet_slo(request, now_ns), request.num_generated)
            for state in states
            for request in state.waiting
        }
        plan = self.schedule(now_ns)
        waiting = {request for state in states for request in state.waiting}
        running = {request for state in states for request in state.running.requests}
        for request in before.keys() - waiting - running:
            assert self.mode == "refuse"
            assert request.finished
            assert not request.num_generated
            assert not request.block_ids
            assert not can_meet_slo(request, now_ns)
        for request in before.keys() & running:
            was_in_time, num_generated = before[request]
            if not was_in_time:
                self.num_admitted_late += 1
                assert not (self.mode == "refuse" and not num_generated)
                in_time = [
                    other
                    for other in waiting
                    if other.service == request.service and can_meet_slo(other, now_ns)
                ]
                assert self.mode == "serve" or not in_time
        if self.mode == "refuse":
            assert all(
                request.num_generated or can_meet_slo(request, now_ns) for request in waiting & before.keys()
            )
        return plan


@st.composite
def late_workloads(draw):
    """Workloads in which goals are missed, without cancellations."""
    work = draw(workloads())
    goals = st.builds(SLO, ttft_s=GOALS, tpot_s=GOALS, mtpot_s=GOALS, e2e_s=GOALS)
    requests = [
        replace(request, slo=draw(goals), arrival_ns=arrival * STEP_NS)
        for request, arrival in zip(work["requests"], work["arrivals"], strict=True)
    ]
    return {**work, "requests": requests, "cancels": {}}


@pytest.mark.parametrize("mode", ["serve", "last", "refuse"])
@settings(max_examples=examples(250), deadline=None)
@given(
    work=late_workloads(),
    order=st.sampled_from(ORDER_POINTS),
    admission=st.sampled_from(ADMISSION_POINTS),
    preemption=st.sampled_from(NO_STARVATION),
)
def test_no_expired_request_is_admitted_before_one_in_time(mode, work, order, admission, preemption):
    watcher = AdmissionWatcher(mode)
    options = {**preemption, "starvation_s": 1e6, "on_hopeless": mode}
    scheduler, done = serve(work, admission, order, watch=watcher.watch, **options)
    assert done.ends.keys() == {request.id for request in work["requests"]}
    refused = {id for id, end in done.ends.items() if end is FinishReason.REFUSED}
    assert not any(done.tokens[id] for id in refused)
    stats = scheduler.stats().services.values()
    assert sum(service.cancelled for service in stats) == len(refused)
    if mode != "refuse":
        assert not refused


def steps(mode, order="fcfs", **options):
    """One request runs at a time, for ten steps; of the waiting ones, ``late`` misses its goal after four."""
    requests = [
        replace(make_request(4, 10, id="runs"), slo=SLO(ttft_s=STEP_S)),
        replace(make_request(4, 2, id="late"), slo=SLO(ttft_s=4 * STEP_S)),
        replace(make_request(4, 2, id="in time"), slo=SLO(ttft_s=40 * STEP_S)),
        make_request(4, 2, id="no goal"),
    ]
    scheduler = make_scheduler(order=order, max_running=1, on_hopeless=mode, **options)
    order_of_ends = []
    finish = scheduler.update

    def update(plan, result, now_ns):
        events = finish(plan, result, now_ns)
        order_of_ends.extend(event.request_id for event in events if event.finish)
        return events

    scheduler.update = update
    return run(scheduler, requests), order_of_ends


@pytest.mark.parametrize("order", ["fcfs", EarliestDeadline()], ids=str)
def test_expired_requests_are_served_put_last_or_refused(order):
    done, ended = steps("serve", order)
    assert ended == ["runs", "late", "in time", "no goal"]
    done, ended = steps("last", order)
    assert ended == ["runs", "in time", "no goal", "late"]
    assert set(done.ends.values()) == {FinishReason.STOP}
    done, ended = steps("refuse", order)
    assert ended == ["runs", "in time", "no goal"]
    assert done.ends["late"] is FinishReason.REFUSED


def test_a_refusal_names_the_missed_goals():
    scheduler = make_scheduler(max_running=1, on_hopeless="refuse")
    scheduler.submit(make_request(4, 10), 0)
    goals = SLO(ttft_s=2.0, e2e_s=30.0)
    scheduler.submit(replace(make_request(4, 10, id="late"), slo=goals, arrival_ns=SECOND), SECOND)
    plan = scheduler.schedule(SECOND)
    scheduler.update(plan, StepResult.of_step([5], 2 * SECOND), 3 * SECOND)
    in_time = scheduler.schedule(3 * SECOND)  # to the nanosecond
    assert scheduler.take_refused() == []
    scheduler.update(in_time, StepResult.of_step([5], STEP_NS), 3 * SECOND + 1)
    scheduler.schedule(3 * SECOND + 1)
    [event] = scheduler.take_refused()
    assert (event.request_id, event.finish, event.tokens) == ("late", FinishReason.REFUSED, ())
    assert "no token after 2 s" in event.error
    assert "(ttft 2 s, e2e 30 s)" in event.error
    assert scheduler.take_refused() == []
    assert scheduler.waiting == 0


def begun_and_preempted(mode):
    """A preempted request with output and a new one wait, and both have missed their goals."""
    pool = make_pool(12, block_size=1, prefix_caching=False)
    scheduler = make_scheduler(pool, on_hopeless=mode)
    requests = [
        make_request(3, 9, id="first", max_tokens=9),
        replace(make_request(3, 9, id="begun", max_tokens=9), slo=SLO(e2e_s=2.5 * STEP_S)),
        replace(make_request(2, 3, id="new", max_tokens=3), slo=SLO(e2e_s=40 * STEP_S)),
    ]
    return run(scheduler, requests), scheduler.stats().services["a"]


@pytest.mark.parametrize("mode", ["last", "refuse"])
def test_an_output_that_has_begun_is_put_last_and_not_refused(mode):
    done, stats = begun_and_preempted(mode)
    assert stats.preemptions >= 1
    assert set(done.ends.values()) == {FinishReason.STOP}
    joined = [line for line in done.log if "joined" in line]
    served, _ = begun_and_preempted("serve")
    assert joined[-1] != [line for line in served.log if "joined" in line][-1]
    # The last to be admitted is the one that had begun: it has more than a prompt of known tokens.
    assert int(joined[-1].split(" of ")[1].split(" ")[0]) > 3


@pytest.mark.parametrize("begun", [False, True])
def test_choices_are_refused_together_unless_one_has_begun(begun):
    """One choice runs at a time, for three steps; after six and a half the others are too late."""
    scheduler = make_scheduler(max_running=1, on_hopeless="refuse")
    if not begun:
        scheduler.submit(make_request(4, 20), 0)
    prompt = list(range(8))
    goals = SLO(ttft_s=6.5 * STEP_S)
    choices = [replace(make_request(output=3, id=f"{n}"), prompt=prompt, slo=goals) for n in range(4)]
    scheduler.submit_all(choices, 0)
    done = run(scheduler)
    ends = [done.ends[choice.id] for choice in choices]
    assert ends == [FinishReason.STOP if begun else FinishReason.REFUSED] * 4


@pytest.mark.parametrize("order", ORDER_POINTS, ids=str)
def test_a_deprioritized_request_is_served_when_it_starves(order):
    """An endless stream of new requests with distant goals would keep it waiting for ever."""
    threshold = 30
    scheduler = make_scheduler(
        max_running=2,
        order=order,
        on_hopeless="last",
        starvation_s=threshold * STEP_S,
        execution_s=4 * STEP_S,
    )
    far = SLO(ttft_s=1e6)
    now = begin = 10 * STEP_NS
    scheduler.submit(replace(make_request(4, 2, id="late"), slo=SLO(ttft_s=STEP_S)), now)
    for _ in range(2):
        scheduler.submit(replace(make_request(4, 8), slo=far, arrival_ns=now), now)
    served = []
    for _ in range(5 * threshold):
        scheduler.submit(replace(make_request(4, 3), slo=far, arrival_ns=now), now)
        plan = scheduler.schedule(now)
        assert isinstance(plan, StepPlan)
        now += STEP_NS
        events = scheduler.update(plan, StepResult.of_step([7] * len(plan.sampled), STEP_NS), now)
        served += [now - begin for event in events if event.request_id == "late"]
    assert threshold * STEP_NS < served[0] <= (threshold + 2) * STEP_NS
    assert len(served) == 2


@pytest.mark.parametrize("mode", ["serve", "last"])
def test_a_deprioritized_request_preempts_nothing(mode):
    """By its deadline it is the most urgent of all, and it would fit in place of the second."""
    pool = make_pool(12, block_size=4, prefix_caching=False)
    preempts = {"preempt_for_waiting": "less-urgent", "starvation_s": 1e6}
    scheduler = make_scheduler(pool, order="edf", on_hopeless=mode, **preempts)
    for name in ("first", "second"):
        scheduler.submit(make_request(20, 3, id=name), 0)
    plan = scheduler.schedule(0)
    assert isinstance(plan, StepPlan)
    scheduler.update(plan, StepResult.of_step([5, 5], STEP_NS), STEP_NS)
    scheduler.submit(replace(make_request(8, 1, id="late"), slo=SLO(ttft_s=STEP_S / 2)), STEP_NS)
    assert isinstance(scheduler.schedule(STEP_NS), StepPlan)
    assert scheduler.stats().services["a"].preemptions == (mode == "serve")


def test_choices_that_wait_are_not_refused_when_another_has_ended():
    scheduler = make_scheduler(max_running=1, order="edf", on_hopeless="refuse")
    prompt, goals = list(range(8)), SLO(ttft_s=6.5 * STEP_S)
    choices = [replace(make_request(output=3, id=f"{n}"), prompt=prompt, slo=goals) for n in range(3)]
    urgent = replace(make_request(4, 9, id="urgent"), slo=SLO(ttft_s=4 * STEP_S))

    def before_step(step, done):
        if step == 0:
            scheduler.submit_all(choices, 0)
        if step == 1:
            scheduler.submit(urgent, STEP_NS)
        return step < 1

    done = run(scheduler, before_step=before_step)
    assert [id for id, end in done.ends.items() if end is FinishReason.STOP] == ["0", "urgent", "1", "2"]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_queue_is_sorted_by_rank_with_expired_requests_last(data):
    """Compared with a set and a sort."""
    queue = WaitingQueue(lambda request: 3 * request.number, lambda request: request.predicted_tokens or None)
    waiting, now_ns = set(), 0
    for number in range(30):
        match data.draw(st.integers(0, 3)):
            case 0 | 1:
                request = make_state(number=number, predicted=data.draw(st.integers(0, 40)))
                request.rank = data.draw(st.integers(0, 3))
                queue.add(request)
                waiting.add(request)
            case 2 if waiting:
                request = data.draw(st.sampled_from(sorted(waiting, key=lambda request: request.number)))
                queue.remove(request)
                waiting.remove(request)
            case 3:
                now_ns += data.draw(st.integers(0, 8))
                queue.demote_slo_expired(now_ns)
        late = {request for request in waiting if 0 < request.predicted_tokens <= now_ns}
        in_order = sorted(waiting, key=lambda request: (request in late, request.rank, request.number))
        assert list(queue) == in_order
        assert {request for request in waiting if request.deprioritized} == late
        assert queue.first_to_starve() is min(waiting, key=lambda request: request.number, default=None)


@pytest.mark.parametrize("wrong", ["refused", "", None])
def test_unknown_values_of_on_hopeless_are_refused(wrong):
    with pytest.raises(ConfigError, match="on_hopeless can be serve, last or refuse"):
        SchedulerOptions(on_hopeless=wrong)
