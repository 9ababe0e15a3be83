"""The doubling budget against the best of all schedules: one job at a time, time charged to the second."""

import random
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_builders import SECOND, FakeService, make_state, taking_part, view_of

from hypothesis_profiles import examples
from shoal.schedule.policies.orders import DoublingBudget
from shoal.schedule.running_batch import RequestTable

Job = tuple[int, int]
"""(release, time) in seconds; its service's mean execution time is its own."""


def served_by(order, jobs: list[Job]) -> float:
    """Sum of latencies over times if in every second the job runs that the order wants most."""
    services = {}
    requests = []
    for number, (release, time) in enumerate(jobs):
        name = f"L{time}"
        services.setdefault(name, FakeService(name, waiting=[], mean_s=time))
        requests.append(make_state(name, number=number, arrival_s=release))
    left = [time for _, time in jobs]
    total, now = 0.0, 0
    while any(left):
        for number, (release, _) in enumerate(jobs):
            if release == now:
                services[requests[number].service].waiting.append(requests[number])
        turns = order.decide(view_of(*services.values()), now * SECOND).turns
        now += 1
        if not turns:
            continue
        service = services[turns[0].service]
        candidates = RequestTable([*taking_part(turns[0], service), *list(turns[0].waiting)[:1]])
        keys = order.keys(service, candidates).tolist()
        _, number = min(zip(keys, candidates.number.tolist(), strict=True))
        request = requests[number]
        if request in service.waiting:
            service.waiting.remove(request)
            service.requests.append(request)
        request.service_time_ns += SECOND
        left[number] -= 1
        if not left[number]:
            service.requests.remove(request)
            release, time = jobs[number]
            total += (now - release) / time
    return total


def best_of_all_orders(times: list[int]) -> float:
    """Everything is there at once; each order in turn."""

    def total(order):
        clock, result = 0, 0.0
        for time in order:
            clock += time
            result += clock / time
        return result

    return min(map(total, permutations(times)))


def best_of_all_schedules(jobs: list[Job]) -> float:
    """With arrivals, and a choice among those present in every second."""

    @cache
    def rest(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0.0
        results = []
        for number, (release, time) in enumerate(jobs):
            if release <= now and left[number]:
                after = (*left[:number], left[number] - 1, *left[number + 1 :])
                ended = 0.0 if after[number] else (now + 1 - release) / time
                results.append(ended + rest(now + 1, after))
        return min(results) if results else rest(now + 1, left)

    return rest(0, tuple(time for _, time in jobs))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from(["join", "literal", "c-mu"]),
)
def test_it_is_optimal_without_arrivals_if_jobs_take_the_mean(times, variant):
    """SeaLLM's Theorem 1, where it holds; by Smith's rule."""
    jobs = [(0, time) for time in times]
    assert served_by(DoublingBudget(variant=variant), jobs) == pytest.approx(best_of_all_orders(times))


def test_it_is_optimal_for_seven_requests_of_three_services():
    times = [5, 2, 7, 2, 5, 7, 2]
    assert served_by(DoublingBudget(), [(0, time) for time in times]) == pytest.approx(
        best_of_all_orders(times)
    )


def test_with_arrivals_it_is_not():
    """Preemption at any second, sums over the three requests.

    At 3 the first has 1 s left of 4 and the third wants 2 of 2: both have O = 4, and the older one goes on.
    At 5 the second overtakes the third: 4/4 + 1/1 + 4/2. The best schedule runs the third first, then the
    second, which arrives just then, and the first last: 2/2 + 1/1 + 7/4. No priority that looks at the two
    alone can know that at 3.
    """
    jobs = [(0, 4), (5, 1), (3, 2)]
    assert served_by(DoublingBudget(), jobs) == 4.0
    assert best_of_all_schedules(jobs) == 3.75


def test_how_far_it_is_from_the_best_with_arrivals(record_property):
    """The gap is recorded, not judged; it can only not be below nothing."""
    draw = random.Random(5)
    gaps = []
    for _ in range(100):
        jobs = [(draw.randrange(9), draw.randint(1, 6)) for _ in range(5)]
        gaps.append(served_by(DoublingBudget(), jobs) / best_of_all_schedules(jobs) - 1)
    assert min(gaps) > -1e-9
    record_property("mean_gap", sum(gaps) / len(gaps))
    record_property("worst_gap", max(gaps))
