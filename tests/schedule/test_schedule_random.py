"""Random workloads through every combination of policies; the executor objects to impossible plans."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run

from hypothesis_profiles import examples
from shoal.core import Client, FinishReason
from shoal.schedule import (
    ADMISSIONS,
    ORDERS,
    VICTIMS,
    Aggressive,
    Batch,
    Conservative,
    DoublingBudget,
    EarliestDeadline,
    Fcfs,
    FcfsStrict,
    Mlfq,
    Oracle,
    PastFuture,
    Predicted,
    RoundRobin,
    ShortestRemaining,
    Slice,
    WeightedTurns,
)
from shoal.schedule.policies.orders import ClientPriority, Fair

ADMISSION_POINTS = [
    Conservative(),
    Conservative(overcommit=1.7, admit_every=3),
    Aggressive(watermark=1.0),
    PastFuture(),
    PastFuture(reserved=0.0, window=3, cold_start="max", draws="max", admit_every=2),
    Predicted(),
    Slice(tokens=1),
    Slice(tokens=5),
    Batch(),
    Oracle(),
]
# Quanta and means are of the length of a few steps, so that levels and budgets change on the way.
STEP_S = STEP_NS / 1e9
ORDER_POINTS = [
    Fcfs(),
    FcfsStrict(),
    RoundRobin(),
    Mlfq(quantum_s=2 * STEP_S, levels=3),
    DoublingBudget(variant="join"),
    DoublingBudget(variant="literal"),
    DoublingBudget(variant="batch"),
    DoublingBudget(variant="c-mu"),
    ShortestRemaining(),
    EarliestDeadline(),
    WeightedTurns(),
    ClientPriority(),
    Fair(),
]
CLIENTS = (None, Client("a"), Client("b", 2.0))
PREEMPTIONS = [
    {"preemption_mode": "recompute"},
    {"preemption_mode": "recompute", "preempt_for_waiting": "less-urgent"},
    {"preemption_mode": "swap"},
    {"preemption_mode": "swap", "preempt_for_waiting": "less-urgent", "host_blocks": 3},
    {"preemption_mode": "swap", "preempt_for_waiting": "less-urgent", "starvation_s": 7 * STEP_S},
    {"preemption_mode": "recompute", "starvation_s": 3 * STEP_S},
]
STOPS = (3, 4)
LENGTHS = ["maximum", "history", "oracle"]


def test_every_policy_is_tried_below():
    assert {type(admission) for admission in ADMISSION_POINTS} == set(ADMISSIONS.values())
    assert {type(order) for order in ORDER_POINTS} == set(ORDERS.values())


@st.composite
def workloads(draw, services=("a", "b", "c")):
    """A pool that is hardly large enough for two, and requests that start alike."""
    names = services[: draw(st.integers(1, len(services)))]
    per_merged = {name: draw(st.integers(1, 3)) for name in names}
    weights = dict.fromkeys(draw(st.sampled_from([(), (), names[-2:], names])), "shared")
    if weights:
        per_merged = dict.fromkeys(names, per_merged[names[0]])
    block_size = draw(st.sampled_from([1, 2, 4]))
    blocks = draw(st.integers(5, 14))
    longest = blocks * block_size
    requests = []
    for number in range(draw(st.integers(1, 14))):
        service = draw(st.sampled_from(names))
        length = draw(st.integers(1, draw(st.sampled_from([longest // 4, longest - 1]))))
        family = draw(st.integers(0, 2))
        common = draw(st.integers(0, length))
        prompt = [family] * common + [100 + number] * (length - common)
        most = draw(st.integers(1, longest - length))
        output = draw(st.integers((most + 1) // 2, most))
        bounded = draw(st.booleans())
        request = make_request(
            prompt,
            output if draw(st.booleans()) or not bounded else None,
            id=f"{number}",
            service=service,
            max_tokens=most if bounded else None,
            ignore_eos=draw(st.booleans()),
        )
        client = CLIENTS[number % len(CLIENTS)]
        requests.append(replace(request, priority=draw(st.integers(-1, 1)), client=client))
    arrivals = [draw(st.sampled_from([0, 0, 5, 30])) for _ in requests]
    cancels = {request.id: draw(st.integers(0, 60)) for request in requests if draw(st.integers(0, 4)) == 0}
    return {
        "pool": {
            "blocks": blocks,
            "block_size": block_size,
            "per_merged": per_merged,
            "alike": bool(weights),
        },
        "weights": weights,
        "co_batch_rows": draw(st.sampled_from([None, None, 1, 2])),
        "requests": requests,
        "arrivals": arrivals,
        "cancels": cancels,
        "caching": draw(st.booleans()),
        "depth": draw(st.sampled_from([1, 2])),
        "max_running": draw(st.sampled_from([1, 2, 100, 100])),
        "max_batched_tokens": draw(st.sampled_from([1, 3, 7, 1000, 1000])),
    }


def serve(
    work,
    admission,
    order="fcfs",
    victim="newest",
    *,
    vocabulary=200,
    max_iterations=1,
    stops_early=True,
    fails=None,
    postpones=lambda seq_id: False,
    is_ready=lambda seq_id: True,
    watch=lambda scheduler: None,
    **options,
):
    scheduler = make_scheduler(
        make_pool(**work["pool"], prefix_caching=work["caching"]),
        weights=work["weights"],
        co_batch_rows=work["co_batch_rows"],
        eos=STOPS,
        admission=admission,
        order=order,
        victim=victim,
        depth=work["depth"],
        max_running=work["max_running"],
        max_batched_tokens=work["max_batched_tokens"],
        execution_s=8 * STEP_S,
        **options,
    )
    watch(scheduler)
    ahead = sorted(zip(work["arrivals"], work["requests"], strict=True), key=lambda pair: pair[0])
    cancels = sorted(work["cancels"].items(), key=lambda pair: pair[1])

    def before_step(step, done):
        while ahead and (ahead[0][0] <= step or not scheduler.unfinished):
            scheduler.submit(ahead.pop(0)[1], step * STEP_NS)
        while cancels and cancels[0][1] <= step:
            event = scheduler.cancel(cancels.pop(0)[0], step * STEP_NS)
            if event is not None:
                done.take([event])
        return bool(ahead)

    done = run(
        scheduler,
        before_step=before_step,
        vocabulary=vocabulary,
        stops=STOPS if stops_early else (),
        max_iterations=max_iterations,
        fails=fails,
        postpones=postpones,
        is_ready=is_ready,
    )
    return scheduler, done


def check_ends(work, scheduler, done):
    for request in work["requests"]:
        tokens, end = done.tokens[request.id], done.ends[request.id]
        stops = () if request.sampling.ignore_eos else STOPS
        if end is FinishReason.CANCELLED:
            assert request.id in work["cancels"]
        elif end is FinishReason.LENGTH:
            most_tokens = scheduler.max_output_tokens(request.service, len(request.prompt))
            assert len(tokens) == (request.sampling.max_tokens or most_tokens)
        else:
            assert tokens[-1] in stops or len(tokens) == request.true_output_tokens
        assert not set(tokens[:-1]) & set(stops)
    stats = scheduler.stats().services.values()
    assert sum(service.finished + service.cancelled for service in stats) == len(work["requests"])
    assert sum(service.waiting + service.running for service in stats) == 0


policies = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDER_POINTS),
        "victim": st.sampled_from(list(VICTIMS)),
        "lengths": st.sampled_from(LENGTHS),
    }
)


@pytest.mark.parametrize("order", ORDER_POINTS, ids=str)
@settings(max_examples=examples(75), deadline=None)
@given(
    work=workloads(),
    admission=st.sampled_from(ADMISSION_POINTS),
    policy=policies,
    preemption=st.sampled_from(PREEMPTIONS),
)
def test_every_request_ends_exactly_once(order, work, admission, policy, preemption):
    scheduler, done = serve(work, admission, **{**policy, **preemption, "order": order})
    assert done.ends.keys() == {request.id for request in work["requests"]}
    check_ends(work, scheduler, done)


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), policies, st.sampled_from(PREEMPTIONS))
def test_outputs_do_not_depend_on_the_policy(work, admission, policy, preemption):
    work = {**work, "cancels": {}}
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1}, Conservative())
    _, other = serve(work, admission, **policy, **preemption)
    assert other.tokens == plain.tokens
    assert other.ends == plain.ends


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from([1, 2]), policies)
def test_conservative_never_preempts(work, depth, policy):
    """With several services packed demand counts: compaction may be needed, preemption never is."""
    scheduler, _ = serve({**work, "depth": depth}, Conservative(), **policy)
    assert sum(service.preemptions for service in scheduler.stats().services.values()) == 0


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from([1, 2, 5]), policies, st.sampled_from(PREEMPTIONS))
def test_no_request_is_preempted_inside_a_slice(work, tokens, policy, preemption):
    """A preempted request has generated a multiple of a slice's tokens since its admission."""
    scheduler = make_scheduler(
        make_pool(**work["pool"], prefix_caching=work["caching"]),
        weights=work["weights"],
        admission=Slice(tokens=tokens),
        execution_s=8 * STEP_S,
        max_running=work["max_running"],
        max_batched_tokens=work["max_batched_tokens"],
        **policy,
        **preemption,
    )
    at_admission, inside_slice = {}, []

    def before_step(step, done):
        if done.plans:
            at_admission.update({joined.seq_id: len(joined.tokens) for joined in done.plans[-1].joined})

    store = scheduler._store
    preempt = store.preempt

    def watch(request):
        seq_id = request.seq_id
        preempt(request)
        inside_slice.append((request.num_tokens - at_admission[seq_id]) % tokens)

    store.preempt = watch
    run(scheduler, work["requests"], before_step=before_step)
    assert not any(inside_slice)


@settings(max_examples=examples(60), deadline=None)
@given(workloads(services=("a",)))
def test_the_oracle_never_preempts_in_lockstep(work):
    """One service, whole prompts in one step, every length known: the forecast is exact."""
    requests = []
    for number, request in enumerate(work["requests"]):
        output = request.true_output_tokens or request.sampling.max_tokens
        requests.append(make_request(request.prompt, output, id=f"{number}", ignore_eos=True))
    plain = {"cancels": {}, "depth": 1, "max_running": 100, "max_batched_tokens": 10_000}
    scheduler, _ = serve({**work, "requests": requests, **plain}, Oracle())
    assert scheduler.stats().services["a"].preemptions == 0


@settings(max_examples=examples(80), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS))
def test_every_token_is_computed_once_where_nothing_is_found_or_lost(work, admission):
    """Prompt and output without the last token, apart from preemptions and prefix cache hits."""
    scheduler, done = serve({**work, "cancels": {}, "depth": 1}, admission)
    needed = sum(len(request.prompt) + len(done.tokens[request.id]) - 1 for request in work["requests"])
    stats = scheduler.stats().services.values()
    cached = sum(service.cached_tokens for service in stats)
    again = sum(service.recomputed_tokens for service in stats)
    if work["caching"]:
        # After a preemption more may be found than was lost: others have computed it meanwhile.
        assert done.computed_tokens <= needed - cached + again
    else:
        assert (done.computed_tokens, cached) == (needed + again, 0)


@settings(max_examples=examples(80), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), st.sampled_from(list(VICTIMS)))
def test_the_same_input_gives_the_same_log(work, admission, victim):
    assert serve(work, admission, victim=victim)[1].log == serve(work, admission, victim=victim)[1].log
