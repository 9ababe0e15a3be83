"""More weights than memory: what fits beside a limit, and how long requests wait for weights by formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_builders import cluster, problem_of

from shoal.core import ConfigError
from shoal.forecast import device_spec, model_spec
from shoal.place.fetch_waits import WeightsLoad, fetch_waits_s
from shoal.place.memory import MemoryCheck, PlacedService

GIB = 1 << 30
MEMORY = device_spec("a800").memory_bytes
MODEL = model_spec("llama-2-7b")
SIZE = MODEL.weight_bytes()


def check_of(services: str, limit: int | None, *, pins: str = "", kv: int = 1000) -> MemoryCheck:
    """Services with weights of their own, of 7 billion parameters; capitals are of 13 billion."""
    models = {name: model_spec("llama-2-13b") if name.isupper() else MODEL for name in services}
    return MemoryCheck(
        {
            name: PlacedService(name=name, model=model, weights=name, kv_floor_tokens=kv, pinned=name in pins)
            for name, model in models.items()
        },
        weights_limit_bytes=limit,
    )


def test_weights_take_at_most_the_limit():
    usable = int(MEMORY * 0.9)
    check = check_of("abcdefgh", 3 * SIZE)
    assert check.left_bytes("ab", MEMORY, 1) == usable - 2 * SIZE
    assert check.left_bytes("abc", MEMORY, 1) == usable - 3 * SIZE
    assert check.left_bytes("abcdefgh", MEMORY, 1) == usable - 3 * SIZE
    assert check.limit_bytes("abc", 1) is None, "all of them stay"
    assert check.limit_bytes("abcd", 1) == 3 * SIZE
    assert check.limit_bytes("abcd", 2) is None, "half of each is on a device"


def test_more_services_than_fit_may_share_a_device_with_a_limit():
    services = "abcdefgh"
    assert not check_of(services, None).fits(services, MEMORY, 1)
    assert check_of(services, 3 * SIZE).fits(services, MEMORY, 1)
    assert not check_of(services, MEMORY).fits(services, MEMORY, 1), "the limit itself must fit"


def test_pinned_weights_and_the_largest_other_must_fit_into_the_limit():
    large = model_spec("llama-2-13b").weight_bytes()
    for limit, fits in ((SIZE + large, True), (SIZE + large - 1, False)):
        assert check_of("abcX", limit, pins="a").fits("abcX", MEMORY, 1) == fits
    assert check_of("abc", SIZE).fits("abc", MEMORY, 1)
    assert not check_of("abc", SIZE, pins="a").fits("abc", MEMORY, 1)


def test_services_that_share_weights_are_pinned_together():
    check = check_of("abc", SIZE, pins="a")
    shared = replace(check, services={**check.services, "b": replace(check.services["b"], weights="a")})
    assert shared.fits("ab", MEMORY, 1), "one copy"
    assert not shared.fits("bac", MEMORY, 1)
    assert shared.fits("bc", MEMORY, 1), "nothing there is pinned"


def test_kv_of_services_whose_weights_are_away_may_be_swapped_out():
    """Each needs 30 GiB for its longest request, and only one of them at a time."""
    kv = 30 * GIB // MODEL.kv_bytes_per_token()
    assert not check_of("ab", None, kv=kv).fits("ab", MEMORY, 1)
    assert check_of("ab", SIZE, kv=kv).fits("ab", MEMORY, 1)
    assert not check_of("ab", 2 * SIZE, kv=kv).fits("ab", MEMORY, 1), "both stay"
    assert not check_of("abc", 2 * SIZE, pins="a", kv=kv).fits("abc", MEMORY, 1)


@given(st.lists(st.sampled_from("abcdXY"), min_size=1, max_size=6, unique=True), st.integers(1, 80))
def test_a_limit_for_all_weights_is_no_limit(names, limit_gib):
    services, limit = "".join(names), limit_gib * GIB
    free, limited = check_of("abcdXY", None), check_of("abcdXY", limit)
    if sum(free.weight_bytes(services, 1).values()) <= limit:
        assert limited.fits(services, MEMORY, 1) == free.fits(services, MEMORY, 1)
        assert limited.left_bytes(services, MEMORY, 1) == free.left_bytes(services, MEMORY, 1)


def test_a_service_larger_than_the_limit_is_named_with_it():
    problem = problem_of({"a": "llama-2-13b"}, 1)
    memory = replace(problem.memory, weights_limit_bytes=SIZE)
    with pytest.raises(ConfigError, match=r"memory for a; .* and weights\.memory is 12\.6 GiB"):
        memory.require(cluster(1))


def test_weights_that_all_fit_cost_no_wait():
    loads = [WeightsLoad(10, 1.0), WeightsLoad(20, 0.1)]
    assert fetch_waits_s(loads, 30, 10.0) == [0.0, 0.0]


def test_waits_follow_from_rates_and_pins():
    """Two of three equal ones fit; requests come so seldom that fetches do not wait for each other."""
    loads = [WeightsLoad(10, 1e-3), WeightsLoad(10, 1e-3), WeightsLoad(10, 1e-3)]
    waits = fetch_waits_s(loads, 20, 10.0)
    assert waits == pytest.approx([1 / 3] * 3, rel=0.01), "absent a third of the time, for a fetch of 1 s"
    often = [WeightsLoad(10, 1.0), *loads[1:]]
    assert fetch_waits_s(often, 20, 10.0)[0] < 0.001
    assert fetch_waits_s(often, 20, 10.0)[1] == pytest.approx(1 / 2, rel=0.01)
    pinned = [replace(loads[0], pinned=True), *loads[1:]]
    assert fetch_waits_s(pinned, 20, 10.0) == pytest.approx([0.0, 1 / 2, 1 / 2], rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(1e-4, 10)), min_size=2, max_size=8), st.integers(1, 10)
)
def test_requests_wait_only_where_not_all_weights_fit(loads, tenths):
    weights = [WeightsLoad(size, rate) for size, rate in loads]
    total = sum(size for size, _ in loads)
    waits = fetch_waits_s(weights, total * tenths // 10, 10.0)
    assert all(0 <= wait_s < math.inf for wait_s in waits)
    if tenths == 10:
        assert sum(waits) == 0


def test_waits_are_those_of_weights_that_leave_least_recently_used_first():
    rates = [2.0**-number for number in range(8)]
    loads = [WeightsLoad(10, rate) for rate in rates]
    draw = np.random.default_rng(1)
    asked = draw.choice(8, 20_000, p=np.array(rates) / sum(rates)).tolist()
    for fitting in (2, 4, 6):
        resident: list[int] = []
        missed = [0] * 8
        for number in asked:
            if number in resident:
                resident.remove(number)
            else:
                missed[number] += 1
            resident = [*resident, number][-fitting:]
        # With a link this quick, requests wait for the fetch of their own weights only.
        waits = fetch_waits_s(loads, fitting * 10, 1e6)
        expected = [missed[number] / asked.count(number) for number in range(8)]
        assert [wait_s / 1e-5 for wait_s in waits] == pytest.approx(expected, abs=0.1)
