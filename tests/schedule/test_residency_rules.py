"""What holds under every residency policy, however bad: requests end, waits are bounded, memory is kept.

``WeightsMachine`` asserts after each step that rows are of resident weights, that weights that leave have no
rows in flight and are not pinned, that the budget is kept, and the integrity of the pool; its executor, that
each token is computed from the right KV. Here are all combinations of policies, budgets, arrivals, failing
fetches, small pools and cancellation.
"""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_executor import STEP_NS
from schedule_builders import make_pool, make_request, make_scheduler
from weights_builders import Eager, Never, WeightsMachine, finished, memory_for

from hypothesis_profiles import examples
from shoal.core import FinishReason
from shoal.schedule.policies.orders import ORDERS, order_class
from shoal.schedule.policies.residency import RESIDENCY_POLICIES, Place, ResidencyDecision, Swap

STEP_S = STEP_NS / 1e9
SOON_NS = 5_000 * STEP_NS
SMALL = st.integers(4, 14)


@dataclass
class Nonsense:
    """Proposes anything: unknown, resident and pinned weights, each several times."""

    seed: int

    def decide(self, view, now_ns):
        chance = random.Random(self.seed + now_ns)
        names = [*view.weights, "unknown"]
        swaps = [Swap(chance.choice(names), chance.choices(names, k=4)) for _ in range(chance.randrange(4))]
        return ResidencyDecision(swaps, chance.choice([None, now_ns + SOON_NS]))


class Shuttle:
    """Swaps out whatever has requests, for weights without any."""

    def decide(self, view, now_ns):
        by_requests = sorted(view.weights.values(), key=lambda each: each.num_requests)
        names = [each.name for each in by_requests]
        return ResidencyDecision([Swap(name, names[::-1]) for name in names], now_ns + SOON_NS)


POLICIES = st.one_of(
    st.sampled_from([cls() for cls in RESIDENCY_POLICIES.values()]),
    st.sampled_from([Eager(), Never(), Shuttle()]),
    st.builds(Nonsense, st.integers(0, 1000)),
)


class Cancelling(WeightsMachine):
    """Also cancels requests at the first event after a time."""

    limit = 20_000
    cancels: dict[str, int] = {}  # noqa: RUF012

    def _arrive(self) -> None:
        super()._arrive()
        for name in [name for name, at_ns in self.cancels.items() if at_ns <= self.now_ns]:
            if not self.scheduler.has_request(name):
                continue
            del self.cancels[name]
            event = self.scheduler.cancel(name, self.now_ns)
            self._take([] if event is None else [event])


@st.composite
def workloads(draw, *, blocks=SMALL, cancels=True):
    """Services with weights, a budget that does not hold all of them, and requests."""
    services = "abcdef"[: draw(st.integers(2, 6))]
    shared = draw(st.booleans())
    weights = dict.fromkeys(services[:2], "w") if shared else {}
    sizes = {name: draw(st.integers(1, 3)) for name in services}
    if shared:
        sizes |= dict.fromkeys(services[:2], sizes["a"])
    by_weights = {weights.get(name, name): size for name, size in sizes.items()}
    pinned = services[-1] if draw(st.integers(0, 3)) == 0 and len(by_weights) > 1 else ""
    others = [size for name, size in by_weights.items() if name not in pinned]
    least = max(others) + sum(sizes[name] for name in pinned)
    block_size, num_blocks = draw(st.sampled_from([1, 2, 4])), draw(blocks)
    longest = num_blocks * block_size
    requests = []
    for number in range(draw(st.integers(1, 16))):
        length = draw(st.integers(1, longest - 1))
        output = draw(st.integers(1, min(30, longest - length)))
        request = make_request(length, output, id=f"{number}", service=draw(st.sampled_from(services)))
        requests.append((draw(st.sampled_from([0, 0, 7, 40, 200])) * STEP_NS, request))
    return {
        "pool": {
            "blocks": num_blocks,
            "block_size": block_size,
            "per_merged": dict.fromkeys(services, 1),
            "alike": True,
            "prefix_caching": draw(st.booleans()),
        },
        "scheduler": {
            "weights": weights,
            "weight_bytes": sizes,
            "pinned": pinned,
            "depth": draw(st.sampled_from([1, 2])),
            "order": order_class(draw(st.sampled_from(sorted(ORDERS))))(),
            "preempt_for_waiting": draw(st.sampled_from(["never", "gain", "less-urgent"])),
            "max_batched_tokens": draw(st.sampled_from([3, 1000, 1000])),
            "max_running": draw(st.sampled_from([1, 100, 100])),
        },
        "budget": draw(st.integers(least, max(least, sum(by_weights.values()) - 1))),
        "requests": requests,
        "fetch_ns": {name: draw(st.sampled_from([1, 5, 60])) * STEP_NS for name in by_weights},
        "cancels": {
            request.id: draw(st.integers(0, 100)) * STEP_NS
            for _, request in requests
            if cancels and draw(st.integers(0, 3)) == 0
        },
    }


def serve(work, policy, *, quantum_steps=20, starvation_steps=100, fails=lambda number: False, **options):
    """The machine after a run of a workload."""
    memory = memory_for(work["budget"], policy, quantum_steps=quantum_steps, max_absence_steps=100)
    scheduler = make_scheduler(
        make_pool(**work["pool"]),
        memory=memory,
        starvation_s=starvation_steps * STEP_S,
        **work["scheduler"],
        **options,
    )
    machine = Cancelling(scheduler, fetch_ns=work["fetch_ns"].get, fails=fails)
    machine.cancels = dict(work["cancels"])
    machine.go(work["requests"])
    return machine


MODES = st.sampled_from(
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap"},
        {"preemption_mode": "swap", "host_blocks": 3},
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(workloads(), POLICIES, MODES, st.sampled_from([2, 20]), st.sets(st.integers(0, 12), max_size=4))
def test_every_request_ends(work, policy, mode, quantum_steps, failing):
    if isinstance(policy, Nonsense | Shuttle):
        # Until the next attempt, 0.5 s later, they would fetch other weights a hundred thousand times.
        failing = set()
    machine = serve(work, policy, quantum_steps=quantum_steps, fails=failing.__contains__, **mode)
    run = machine.run
    assert set(run.ends) == {request.id for _, request in work["requests"]}
    assert not machine.scheduler.unfinished
    for request_id, reason in run.ends.items():
        if reason is FinishReason.UNLOADED:
            assert max(run.failed_fetches.values()) >= 3
        elif reason is FinishReason.CANCELLED:
            assert request_id in work["cancels"]
        else:
            assert request_id in finished(run)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), POLICIES)
def test_nothing_is_computed_again_while_the_host_has_room(work, policy):
    machine = serve(work, policy, preemption_mode="swap", host_blocks=1_000)
    assert sum(service.recomputed_tokens for service in machine.scheduler.stats().services.values()) == 0


@settings(max_examples=examples(100), deadline=None)
@given(workloads(blocks=st.just(2_000), cancels=False), POLICIES)
def test_waits_are_bounded(work, policy):
    """Also where the policy swaps nothing, or everything. The pool is large and steps are full, so that only
    weights are waited for."""
    work["scheduler"] |= {"max_batched_tokens": 100_000, "max_running": 100}
    work["requests"] = [
        (at_ns, replace(request, prompt=request.prompt[:20])) for at_ns, request in work["requests"]
    ]
    quantum, threshold = 40, 100
    run = serve(work, policy, quantum_steps=quantum, starvation_steps=threshold).run
    longest_fetch_ns = max(work["fetch_ns"].values())
    turn_ns = max(quantum * STEP_NS, longest_fetch_ns)
    turns_ns = sum(fetch_ns + turn_ns for fetch_ns in work["fetch_ns"].values())
    # A fetch is under way, or the weights have just left. Then all others come first, with as many that the
    # policy proposes, and requests for those step.
    proposed_ns = len(work["fetch_ns"]) * (longest_fetch_ns + turn_ns)
    bound_ns = 2 * threshold * STEP_NS + longest_fetch_ns + turns_ns + proposed_ns + turn_ns
    for at_ns, request in work["requests"]:
        times_ns = run.tokens_ns[request.id]
        gaps_ns = [after - before for before, after in zip([at_ns, *times_ns], times_ns, strict=False)]
        assert max(gaps_ns) <= bound_ns


@settings(max_examples=examples(50), deadline=None)
@given(workloads(cancels=False), POLICIES)
def test_tokens_are_those_of_an_engine_that_holds_all_weights(work, policy):
    limited = serve(work, policy, preemption_mode="swap")
    work["budget"] = 1_000
    unlimited = serve(work, policy, preemption_mode="swap")
    assert limited.run.tokens == unlimited.run.tokens
    assert not unlimited.run.evicted


class Favourites:
    """Swaps for a and b alone."""

    def decide(self, view, now_ns):
        wanted = [name for name in "ab" if view.weights[name].place is Place.ABSENT]
        return ResidencyDecision([Swap(name, list(view.weights)) for name in wanted])


def test_every_other_fetch_is_one_that_the_policy_proposes():
    """Under overload there is always a request that has waited too long."""
    pool = make_pool(256, per_merged=dict.fromkeys("abcdef", 1), alike=True)
    memory = memory_for(1, Favourites(), max_absence_steps=30)
    scheduler = make_scheduler(pool, memory=memory, starvation_s=30 * STEP_S)
    requests = [(0, make_request(4, 40, service=name)) for name in "abcdef"]
    fetched = WeightsMachine(scheduler).go(requests).fetched
    others = [name in "cdef" for name in fetched]
    assert not any(one and two for one, two in pairwise(others[: others.index(True) + 20]))
    assert set(fetched[:20]) == set("abcdef")


@pytest.mark.parametrize("policy", [cls() for cls in RESIDENCY_POLICIES.values()], ids=str)
def test_pinned_weights_come_first_and_stay(policy):
    pool = make_pool(64, per_merged=dict.fromkeys("abc", 1), alike=True)
    scheduler = make_scheduler(pool, memory=memory_for(2, policy), pinned=("c",))
    requests = [(n * 3 * STEP_NS, make_request(6, 9, service="ab"[n % 2])) for n in range(10)]
    run = WeightsMachine(scheduler).go(requests)
    assert run.fetched[0] == "c"
    assert run.fetched.count("c") == 1
    assert finished(run) == {request.id for _, request in requests}
