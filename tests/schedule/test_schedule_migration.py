"""Requests that change engines again and again say what they would have said on one."""

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from migration_builders import engine_of, make_some_request
from schedule_builders import SECOND, make_pool, make_scheduler, run

from crossed import each_nth
from hypothesis_profiles import examples
from shoal.config import PRESETS


@pytest.mark.parametrize("preset", each_nth(PRESETS, 4, at=2))
@given(seed=st.integers(0, 2**32), depths=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2))))
@settings(max_examples=examples(25), deadline=None)
def test_migration_changes_no_output(preset, seed, depths):
    """Two engines with clocks far apart, between which requests are moved at random."""
    random = Random(seed)
    requests = [make_some_request(random, number) for number in range(8)]
    expected = run(make_scheduler(make_pool(60, per_merged={"a": 1, "b": 2})), requests)
    first = engine_of(preset, depths[0], 7 * SECOND)
    second = engine_of(preset, depths[1], 5_000 * SECOND, blocks=20)
    tokens, ends, host = {request.id: [] for request in requests}, {}, {}
    coming = deque(requests)
    while coming or len(ends) < len(requests):
        if coming and random.random() < 0.5:
            request = coming.popleft()
            host[request.id] = random.choice((first, second))
            host[request.id].submit(replace(request, arrival_ns=host[request.id].now_ns))
        for engine in (first, second):
            for event in engine.step():
                assert event.request_id not in ends
                assert host[event.request_id] is engine
                tokens[event.request_id] += event.tokens
                if event.finish is not None:
                    ends[event.request_id] = event.finish
        for name, engine in list(host.items()):
            if name not in ends and random.random() < 0.1:
                moved = engine.scheduler.detach(name, engine.now_ns)
                assert moved is not None
                assert list(moved.output_tokens) == tokens[name]
                assert engine.scheduler.detach(name, engine.now_ns) is None
                host[name] = second if engine is first else first
                host[name].submit(moved)
    for engine in (first, second):
        while engine.flights:
            assert not engine.step()
        engine.check_empty()
    assert tokens == expected.tokens
    assert ends == expected.ends
    counted = [engine.scheduler.stats().services[name] for engine in (first, second) for name in "ab"]
    assert sum(service.finished for service in counted) == len(requests)
    prompt_tokens = sum(len(request.prompt) for request in requests)
    assert sum(service.prompt_tokens for service in counted) == prompt_tokens
    assert sum(service.output_tokens for service in counted) == sum(map(len, tokens.values()))
    observed = [engine.scheduler.observed(engine.now_ns) for engine in (first, second)]
    arrivals = [services[name].traffic.arrivals_per_s for services in observed for name in "ab"]
    # Rates are over at least a second, and the whole test takes less.
    assert sum(arrivals) == len(requests)
