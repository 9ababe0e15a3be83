"""Requests that change engines again and again say what they would have said on one."""

from collections import deque
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_executor import ReplayExecutor
from schedule_builders import SECOND, make_pool, make_request, make_scheduler, run

from hypothesis_profiles import examples
from shoal.config import PRESETS
from shoal.core import Idle, Request, TokenEvent
from shoal.kvcache import BlockPool
from shoal.schedule import Scheduler


class Engine:
    """A scheduler and an executor that checks everything, with a clock of its own."""

    def __init__(self, scheduler: Scheduler, clock_ns: int = 0) -> None:
        self.scheduler = scheduler
        self.pool: BlockPool = scheduler.pool  # type: ignore[attr-defined]
        self.executor = ReplayExecutor(self.pool)
        self.flights = deque()
        self.now_ns = clock_ns
        self.events = []

    def submit(self, request: Request) -> None:
        self.events += self.scheduler.submit(request, self.now_ns)

    def step(self) -> list[TokenEvent]:
        """Plan what can be planned, and let the oldest plan end; returns events."""
        while len(self.flights) < self.scheduler.options.depth:
            plan = self.scheduler.schedule(self.now_ns)
            self.pool.check_integrity()
            if isinstance(plan, Idle):
                assert self.scheduler.schedule(self.now_ns) == plan, "looking again changed something"
                break
            self.flights.append((plan, self.executor.run(plan)))
        if self.flights:
            plan, result = self.flights.popleft()
            self.now_ns += result.duration_ns
            self.events += self.scheduler.update(plan, result, self.now_ns)
            self.pool.check_integrity()
        else:
            assert self.events or not self.scheduler.unfinished, "the scheduler is stuck"
        events, self.events = self.events, []
        return events

    def check_empty(self) -> None:
        assert all(self.pool.live_blocks(service) == 0 for service in self.pool.layout.services)
        host = self.scheduler.host  # type: ignore[attr-defined]
        assert host is None or all(not host.live_blocks(service) for service in host.layout.services)


def engine_of(preset: str, depth: int, clock_ns: int, blocks: int = 14) -> Engine:
    chosen = replace(PRESETS[preset].scheduler, depth=depth, max_batched_tokens=24)
    options = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    return Engine(make_scheduler(make_pool(blocks, per_merged={"a": 1, "b": 2}), **options), clock_ns)


def make_some_request(random: Random, number: int) -> Request:
    """Of either service, with a prompt that others may share the beginning of."""
    own = [10_000 + 100 * number + at for at in range(random.randint(1, 12))]
    return make_request(
        [*range(random.choice((0, 4, 8))), *own],
        random.choice((None, random.randint(1, 16))),
        max_tokens=random.randint(1, 16),
        service=random.choice("ab"),
        id=f"q{number}",
    )


@pytest.mark.parametrize("preset", PRESETS)
@given(seed=st.integers(0, 2**32), depths=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2))))
@settings(max_examples=examples(25), deadline=None)
def test_requests_that_change_engines_say_what_they_would_have_said(preset, seed, depths):
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
