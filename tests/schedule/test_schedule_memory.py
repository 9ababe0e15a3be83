"""What becomes of KV: swapped, compacted, preempted; and memory for slices."""

from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler, run

from shoal.core import FinishReason, Idle, StepResult
from shoal.schedule import Conservative, DoublingBudget, Slice

TWO = {"a": 1, "b": 1}


def step(scheduler, now_ns=0, duration_ns=STEP_NS):
    plan = scheduler.schedule(now_ns)
    assert not isinstance(plan, Idle)
    events = scheduler.update(
        plan, StepResult.of_step([7] * len(plan.sampled), duration_ns), now_ns + duration_ns
    )
    return plan, events


# Swap


def test_a_swapped_request_goes_on_without_computing_anything_again():
    requests = [make_request(7, 8, id="x"), make_request(6, 8, id="y")]
    scheduler = make_scheduler(make_pool(5, prefix_caching=False), preemption_mode="swap")
    done = run(scheduler, requests)
    alone = run(make_scheduler(make_pool(prefix_caching=False)), requests)
    stats = scheduler.stats().services["a"]
    assert stats.preemptions > 0
    assert stats.recomputed_tokens == 0
    assert stats.swapped_tokens > 0
    assert done.copied["out"] > 0
    assert done.copied["in"] == done.copied["out"]
    assert done.computed_tokens == alone.computed_tokens
    assert done.tokens == alone.tokens


def test_what_the_prefix_index_still_has_is_not_copied_back():
    requests = [make_request(8, 8, id="x"), make_request(8, 8, id="y")]
    scheduler = make_scheduler(make_pool(6), preemption_mode="swap")
    done = run(scheduler, requests)
    assert scheduler.stats().services["a"].recomputed_tokens == 0
    assert 0 < done.copied["in"] < done.copied["out"]


def test_without_room_on_the_host_kv_is_computed_again():
    requests = [make_request(7, 8, id="x"), make_request(6, 8, id="y")]
    scheduler = make_scheduler(make_pool(5, prefix_caching=False), preemption_mode="swap", host_blocks=1)
    run(scheduler, requests)
    stats = scheduler.stats().services["a"]
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0


def test_a_request_cancelled_while_swapped_leaves_nothing_behind():
    scheduler = make_scheduler(make_pool(5, prefix_caching=False), preemption_mode="swap")
    for name in "xy":
        scheduler.submit(make_request(7, 8, id=name), 0)
    while not scheduler.stats().services["a"].swapped:
        step(scheduler)
    assert scheduler.host.live_blocks("a") > 0
    waiting = scheduler.services["a"].waiting[0].request.id
    assert scheduler.cancel(waiting, 0) is not None
    assert scheduler.host.live_blocks("a") == 0


# Compaction


def test_a_fragmented_pool_is_compacted_for_a_waiting_request():
    """Three of a's requests fill three merged blocks by half; b needs one, and one is free in pieces."""
    scheduler = make_scheduler(make_pool(3, per_merged={"a": 2, "b": 1}, prefix_caching=False))
    short = [make_request(4, 1, service="a", id=f"short{i}") for i in range(3)]
    long = [make_request(3, 2 + i, service="a", id=f"long{i}") for i in range(3)]
    requests = [request for pair in zip(long, short, strict=True) for request in pair]
    done = run(scheduler, [*requests, make_request(3, 1, service="b", id="b")])
    assert done.copied["within"] > 0
    assert sum(service.preemptions for service in scheduler.stats().services.values()) == 0
    # The compaction made room for it while a's longest was still there.
    assert list(done.ends).index("b") < list(done.ends).index("long2")


# Preemption


def budgets(**options):
    return make_scheduler(
        make_pool(10, per_merged=TWO, prefix_caching=False),
        order=DoublingBudget(),
        execution_s=4 * STEP_NS / 1e9,
        victim="lowest-priority",
        **options,
    )


def test_an_urgent_request_preempts_those_beyond_their_budget():
    def ends(preempt):
        scheduler = budgets(preempt_for_waiting=preempt)
        for at in range(2):
            scheduler.submit(make_request(8, 10, service="a", id=f"long{at}"), 0)
        now = 0
        for _ in range(5):
            step(scheduler, now)
            now += STEP_NS
        scheduler.submit(make_request(12, 1, service="b", id="short"), now)
        order = []
        while scheduler.unfinished:
            _, events = step(scheduler, now)
            now += STEP_NS
            order += [event.request_id for event in events if event.finish]
        return order, scheduler.stats().services["a"].preemptions

    assert ends("never") == (["long0", "long1", "short"], 0)
    order, preemptions = ends("less-urgent")
    assert order[0] == "short"
    assert preemptions == 1


def test_the_oldest_admitted_is_not_preempted():
    scheduler = budgets(preempt_for_waiting="less-urgent")
    scheduler.submit(make_request(30, 10, service="a", id="oldest"), 0)
    now = 0
    for _ in range(6):
        step(scheduler, now)
        now += STEP_NS
    scheduler.submit(make_request(12, 1, service="b", id="short"), now)
    while scheduler.unfinished:
        step(scheduler, now)
        now += STEP_NS
    assert scheduler.stats().services["a"].preemptions == 0


def test_a_preempted_request_does_not_take_its_place_again():
    """The victim's rank is better than the new request's (a queue of fresh ones drifted); it must wait."""
    scheduler = budgets(preempt_for_waiting="less-urgent")
    for at in range(2):
        scheduler.submit(make_request(8, 10, service="a", id=f"long{at}"), 0)
    now = 0
    for _ in range(5):
        step(scheduler, now)
        now += STEP_NS
    # New requests of the same service are more urgent than one beyond its budget.
    scheduler.submit(make_request(12, 1, service="a", id="fresh"), now)
    waiting = scheduler.services["a"].waiting
    fresh = waiting[0]
    waiting.remove(fresh)
    fresh.rank = 9.0
    waiting.add(fresh)
    plan, _ = step(scheduler, now)
    assert scheduler.stats().services["a"].preemptions == 1
    assert [len(joined.tokens) for joined in plan.joined] == [12]


def test_a_turn_that_preempts_its_only_decode_is_followed_by_another():
    """Round-robin offers decodes without prompts; the engine is not idle while a request could run."""
    for seed in range(40):
        scheduler = make_scheduler(
            make_pool(4 + seed % 3, per_merged={"a": 1, "b": 2}, block_size=2, prefix_caching=False),
            order="round-robin",
            victim=("newest", "fewest-tokens")[seed % 2],
        )
        run(scheduler, [make_request(1 + (seed * 7 + i) % 4, 4, service="ab"[i % 2]) for i in range(6)])


def test_a_starved_request_that_needs_all_memory_preempts_all_at_once():
    scheduler = make_scheduler(
        make_pool(30, prefix_caching=False), starvation_s=3 * STEP_NS / 1e9, order="fcfs"
    )
    for _ in range(20):
        scheduler.submit(make_request(3, 60, max_tokens=90), 0)
    scheduler.submit(make_request(116, 4, id="large", max_tokens=4), 0)
    now, joined = 0, []
    for _ in range(6):
        plan, _ = step(scheduler, now)
        now += STEP_NS
        joined.append([len(sequence.tokens) for sequence in plan.joined])
    assert joined == [[3] * 20, [], [], [116], [], []]
    assert scheduler.stats().services["a"].preemptions == 20


def test_a_request_stopped_before_its_first_token_has_an_event():
    scheduler = make_scheduler()
    scheduler.submit(make_request(3, 5, id="x"), 0)
    event = scheduler.cancel("x", 0, FinishReason.STOP)
    assert event is not None
    assert event.finish is FinishReason.STOP
    assert scheduler.unfinished == 0


# Slices


def test_a_slice_reserves_its_blocks_when_it_begins_and_none_inside():
    scheduler = make_scheduler(make_pool(20, block_size=1), admission=Slice(tokens=4))
    scheduler.submit(make_request(3, 10, max_tokens=10), 0)
    plans = [step(scheduler)[0] for _ in range(10)]
    assert len(plans[0].joined[0].blocks) == 7
    assert [len(blocks) for plan in plans for _, blocks in plan.grown] == [4, 2]
    assert [plan.number for plan in plans if plan.grown] == [4, 8]


def test_at_the_end_of_a_slice_a_request_keeps_its_kv_and_waits_for_memory():
    """Two of 3 + 4 tokens fill 14 of 16; one can have 2 more, the other waits without preemption."""
    scheduler = make_scheduler(make_pool(16, block_size=1, prefix_caching=False), admission=Slice(tokens=4))
    requests = [make_request(3, 6, id=name, max_tokens=6) for name in "xy"]
    done = run(scheduler, requests)
    assert scheduler.stats().services["a"].preemptions == 0
    assert list(done.ends) == ["x", "y"]


def test_if_no_request_gets_a_slice_the_lowest_priority_is_preempted():
    scheduler = make_scheduler(
        make_pool(14, block_size=1, prefix_caching=False),
        admission=Slice(tokens=4),
        victim="lowest-priority",
    )
    requests = [make_request(3, 8, id=name, max_tokens=8) for name in "xy"]
    done = run(scheduler, requests)
    preemptions = scheduler.stats().services["a"].preemptions
    joined = [joined.seq_id for plan in done.plans for joined in plan.joined]
    assert list(done.ends) == ["x", "y"]
    assert (preemptions, len(joined)) in {(0, 2), (1, 3)}


def test_a_waiting_request_is_not_admitted_if_none_could_continue_afterwards():
    """x holds 7 of 13 after its prompt, and could then still get its last 2; with y's 7 neither could."""
    scheduler = make_scheduler(make_pool(13, block_size=1, prefix_caching=False), admission=Slice(tokens=4))
    requests = [make_request(3, 8, id=name, max_tokens=8) for name in "xy"]
    done = run(scheduler, requests)
    assert scheduler.stats().services["a"].preemptions == 0
    first_of_y = next(plan.number for plan in done.plans if any(joined.seq_id == 1 for joined in plan.joined))
    assert first_of_y == 8


# Starved requests, tested with conservative admission.


def test_conservative_admission_is_not_preempted_into():
    scheduler = make_scheduler(
        make_pool(6, per_merged=TWO, prefix_caching=False), admission=Conservative(), order=DoublingBudget()
    )
    run(scheduler, [make_request(8, 6, service=name, max_tokens=8) for name in "abab"])
    assert sum(service.preemptions for service in scheduler.stats().services.values()) == 0


def test_a_request_of_the_whole_pool_is_admitted_although_its_prompt_is_cached():
    # Beside the copy of its last cached block there is no room for that block itself.
    scheduler = make_scheduler(make_pool(5, block_size=2), admission=Slice(tokens=1))
    done = run(scheduler, [make_request([1] * 8, 1, id=name) for name in "xy"])
    assert set(done.ends.values()) == {FinishReason.STOP}
    assert scheduler.stats().services["a"].cached_tokens == 6
