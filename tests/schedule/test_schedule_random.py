"""Random workloads through every combination of policies; the executor objects to impossible plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run

from hypothesis_profiles import examples
from shoal.core import FinishReason
from shoal.schedule import (
    ADMISSIONS,
    ORDERS,
    VICTIMS,
    Aggressive,
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

ADMISSION_POINTS = [
    Conservative(),
    Conservative(overcommit=1.7, admit_every=3),
    Aggressive(watermark=1.0),
    PastFuture(),
    PastFuture(reserved=0.0, window=3, cold_start="max", draws="max", admit_every=2),
    Predicted(),
    Slice(tokens=1),
    Slice(tokens=5),
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
]
EVICTIONS = [
    {"eviction": "recompute"},
    {"eviction": "recompute", "preempt": True},
    {"eviction": "swap"},
    {"eviction": "swap", "preempt": True, "host_blocks": 3},
    {"eviction": "swap", "preempt": True, "starvation_s": 7 * STEP_S},
    {"eviction": "recompute", "starvation_s": 3 * STEP_S},
]
LENGTHS = ["maximum", "history", "oracle"]


def test_every_policy_is_tried_below():
    assert {type(one) for one in ADMISSION_POINTS} == set(ADMISSIONS.values())
    assert {type(one) for one in ORDER_POINTS} == set(ORDERS.values())


@st.composite
def workloads(draw, services=("a", "b", "c")):
    """A pool that is hardly large enough for two, and requests that start alike."""
    names = services[: draw(st.integers(1, len(services)))]
    per_merged = {name: draw(st.integers(1, 3)) for name in names}
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
        ceiling = draw(st.integers(1, longest - length))
        output = draw(st.integers((ceiling + 1) // 2, ceiling))
        bounded = draw(st.booleans())
        requests.append(
            make_request(
                prompt,
                output if draw(st.booleans()) or not bounded else None,
                id=f"{number}",
                service=service,
                max_tokens=ceiling if bounded else None,
                ignore_eos=draw(st.booleans()),
            )
        )
    arrivals = [draw(st.sampled_from([0, 0, 5, 30])) for _ in requests]
    cancels = {one.id: draw(st.integers(0, 60)) for one in requests if draw(st.integers(0, 4)) == 0}
    return {
        "pool": (blocks, block_size, per_merged),
        "requests": requests,
        "arrivals": arrivals,
        "cancels": cancels,
        "caching": draw(st.booleans()),
        "depth": draw(st.sampled_from([1, 2])),
        "max_running": draw(st.sampled_from([1, 2, 100, 100])),
        "max_batched_tokens": draw(st.sampled_from([1, 3, 7, 1000, 1000])),
    }


def check_columns(group):
    """What is kept from step to step is what the requests say."""
    columns, running = group.columns, list(group.running)
    assert columns.requests == running
    for name in ("prompt_tokens", "expected", "generated", "charged_ns", "predicted"):
        assert getattr(columns, name).tolist() == [getattr(one, name) for one in running], name
    assert columns.last_tokens.tolist() == [one.last_token for one in running]
    assert columns.numbers.tolist() == [one.number for one in running]
    assert group.ending == sum(one.ending is not None for one in running)


def serve(work, admission, order="fcfs", victim="newest", **options):
    blocks, block_size, per_merged = work["pool"]
    scheduler = make_scheduler(
        make_pool(blocks, block_size=block_size, per_merged=per_merged, prefix_caching=work["caching"]),
        eos=(3, 4),
        admission=admission,
        order=order,
        victim=victim,
        depth=work["depth"],
        max_running=work["max_running"],
        max_batched_tokens=work["max_batched_tokens"],
        execution_s=8 * STEP_S,
        **options,
    )
    ahead = sorted(zip(work["arrivals"], work["requests"], strict=True), key=lambda pair: pair[0])
    cancels = sorted(work["cancels"].items(), key=lambda pair: pair[1])

    def before_step(step, done):
        while ahead and (ahead[0][0] <= step or not scheduler.unfinished):
            scheduler.submit(ahead.pop(0)[1], step * STEP_NS)
        while cancels and cancels[0][1] <= step:
            event = scheduler.cancel(cancels.pop(0)[0], step * STEP_NS)
            if event is not None:
                done.take([event])
        for group in scheduler.groups.values():
            check_columns(group)
        return bool(ahead)

    return scheduler, run(scheduler, before_step=before_step, vocabulary=200)


def check_ends(work, scheduler, done):
    for one in work["requests"]:
        tokens, end = done.tokens[one.id], done.ends[one.id]
        stops = () if one.sampling.ignore_eos else (3, 4)
        if end is FinishReason.CANCELLED:
            assert one.id in work["cancels"]
        elif end is FinishReason.LENGTH:
            assert len(tokens) == (one.sampling.max_tokens or scheduler.ceiling(one.service, len(one.prompt)))
        else:
            assert tokens[-1] in stops or len(tokens) == one.true_output_tokens
        assert not set(tokens[:-1]) & set(stops)
    stats = scheduler.stats().services.values()
    assert sum(one.finished + one.cancelled for one in stats) == len(work["requests"])
    assert sum(one.waiting + one.running for one in stats) == 0


policies = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDER_POINTS),
        "victim": st.sampled_from(list(VICTIMS)),
        "lengths": st.sampled_from(LENGTHS),
    }
)


@pytest.mark.parametrize("order", ORDER_POINTS, ids=str)
@pytest.mark.parametrize("eviction", EVICTIONS, ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(work=workloads(), admission=st.sampled_from(ADMISSION_POINTS), policy=policies)
def test_every_request_ends_exactly_once(order, eviction, work, admission, policy):
    scheduler, done = serve(work, admission, **{**policy, **eviction, "order": order})
    assert done.ends.keys() == {one.id for one in work["requests"]}
    check_ends(work, scheduler, done)


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), policies, st.sampled_from(EVICTIONS))
def test_outputs_do_not_depend_on_the_policy(work, admission, policy, eviction):
    work = {**work, "cancels": {}}
    _, plain = serve({**work, "caching": False, "depth": 1, "max_running": 1}, Conservative())
    _, other = serve(work, admission, **policy, **eviction)
    assert other.tokens == plain.tokens
    assert other.ends == plain.ends


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from([1, 2]), policies)
def test_conservative_never_evicts(work, depth, policy):
    """With several services packed demand counts: compaction may be needed, eviction never is."""
    scheduler, _ = serve({**work, "depth": depth}, Conservative(), **policy)
    assert sum(one.evictions for one in scheduler.stats().services.values()) == 0


@settings(max_examples=examples(150), deadline=None)
@given(workloads(), st.sampled_from([1, 2, 5]), policies, st.sampled_from(EVICTIONS))
def test_nobody_is_evicted_inside_a_slice(work, tokens, policy, eviction):
    """Who leaves has generated a multiple of a slice's tokens since it was let in."""
    blocks, block_size, per_merged = work["pool"]
    scheduler = make_scheduler(
        make_pool(blocks, block_size=block_size, per_merged=per_merged, prefix_caching=work["caching"]),
        admission=Slice(tokens=tokens),
        execution_s=8 * STEP_S,
        max_running=work["max_running"],
        max_batched_tokens=work["max_batched_tokens"],
        **policy,
        **eviction,
    )
    at_entry, evicted = {}, []

    def before_step(step, done):
        if done.plans:
            at_entry.update({one.sequence: len(one.tokens) for one in done.plans[-1].joined})

    ledger = scheduler._ledger
    evict = ledger.evict

    def watch(one):
        evicted.append((one.known - at_entry[one.sequence]) % tokens)
        evict(one)

    ledger.evict = watch
    run(scheduler, work["requests"], before_step=before_step)
    assert not any(evicted)


@settings(max_examples=examples(60), deadline=None)
@given(workloads(services=("a",)))
def test_the_oracle_never_evicts_in_lockstep(work):
    """One service, whole prompts in one step, every length known: the forecast is exact."""
    requests = []
    for number, one in enumerate(work["requests"]):
        output = one.true_output_tokens or one.sampling.max_tokens
        requests.append(make_request(one.prompt, output, id=f"{number}", ignore_eos=True))
    plain = {"cancels": {}, "depth": 1, "max_running": 100, "max_batched_tokens": 10_000}
    scheduler, _ = serve({**work, "requests": requests, **plain}, Oracle())
    assert scheduler.stats().services["a"].evictions == 0


@settings(max_examples=examples(80), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS))
def test_every_token_is_computed_once_where_nothing_is_found_or_lost(work, admission):
    """Prompt and output without the last token; what was evicted or found in the prefix index beside."""
    scheduler, done = serve({**work, "cancels": {}, "depth": 1}, admission)
    needed = sum(len(one.prompt) + len(done.tokens[one.id]) - 1 for one in work["requests"])
    stats = scheduler.stats().services.values()
    cached = sum(one.cached_tokens for one in stats)
    again = sum(one.recomputed_tokens for one in stats)
    if work["caching"]:
        # After an eviction more may be found than was lost: others have computed it meanwhile.
        assert done.computed_tokens <= needed - cached + again
    else:
        assert (done.computed_tokens, cached) == (needed + again, 0)


@settings(max_examples=examples(80), deadline=None)
@given(workloads(), st.sampled_from(ADMISSION_POINTS), st.sampled_from(list(VICTIMS)))
def test_the_same_input_gives_the_same_log(work, admission, victim):
    assert serve(work, admission, victim=victim)[1].log == serve(work, admission, victim=victim)[1].log
