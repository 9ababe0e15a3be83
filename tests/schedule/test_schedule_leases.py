"""Requests that change engines with their KV, and blocks that are kept for them."""

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from migration_builders import Engine, engine_of, make_some_request
from schedule_builders import SECOND, make_pool, make_request, make_scheduler, run

from crossed import each_nth
from hypothesis_profiles import examples
from shoal.config import PRESETS
from shoal.core import Idle, InvalidRequest, StepPlan
from shoal.kvcache import BlockPool, KVShape, LayerShape, plan_layout
from shoal.schedule import Conservative, Slice


def split_pool(blocks: int) -> BlockPool:
    """Of one service with blocks of three units."""
    shape = KVShape(dtype="float32", layers=(LayerShape(3, 8, 8),))
    layout = plan_layout({"a": shape}, memory_bytes=blocks * shape.block_bytes(4), block_size=4, kind="split")
    return BlockPool(layout)


class RandomMigrations:
    """Migrates requests between two engines at random, with their KV, in all possible ways."""

    def __init__(self, random: Random, engines: tuple[Engine, Engine]) -> None:
        self.random = random
        self.engines = engines
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, object] = {}
        self.hosts: dict[str, Engine] = {}
        self.held: dict[str, tuple[Engine, object]] = {}
        self.number = 0
        self.names: dict[str, str] = {}
        """Request name by id; a request gets another id with every migration."""

    def submit(self, engine: Engine, request) -> None:
        self.tokens.setdefault(request.id, [])
        self.names[request.id] = request.id
        self.hosts[request.id] = engine
        engine.submit(replace(request, arrival_ns=engine.now_ns))

    def step(self) -> None:
        for engine in self.engines:
            self.take(engine, engine.step())

    def take(self, engine: Engine, events) -> None:
        for event in events:
            name = self.names[event.request_id]
            assert name not in self.ends
            assert self.hosts[name] is engine
            assert event.position == len(self.tokens[name])
            self.tokens[name] += event.tokens
            if event.finish is not None:
                self.ends[name] = event.finish

    def drain(self, engine: Engine) -> None:
        engine.drain()
        self.take(engine, engine.take_events())

    def current_id(self, name: str) -> str:
        return next(reversed([own for own, whose in self.names.items() if whose == name]))

    def new_id(self, name: str) -> str:
        self.number += 1
        self.names[f"{name}#{self.number}"] = name
        return f"{name}#{self.number}"

    def hold(self, name: str) -> None:
        """Take a request out, if it runs."""
        source = self.hosts[name]
        self.drain(source)
        if name in self.ends:
            return
        held = source.scheduler.hold(f"m-{name}", self.current_id(name), source.now_ns)
        source.check_tables()
        if held is not None:
            assert list(held.request.output_tokens) == self.tokens[name]
            assert source.scheduler.table_of(self.current_id(name)) is None
            self.held[name] = (source, held)

    def settle(self, name: str) -> None:
        """Let a held request go on: here, there, or from its tokens."""
        source, held = self.held.pop(name)
        [destination] = [engine for engine in self.engines if engine is not source]
        key = f"m-{name}"
        self.drain(source)
        how = self.random.choice(("here", "there", "there", "tokens"))
        if how == "here":
            renamed = self.random.random() < 0.5
            request_id = self.new_id(name) if renamed else None
            source.carry_out(source.scheduler.resume(key, source.now_ns, request_id))
            return
        request = replace(held.request, id=self.new_id(name))
        blocks = -(-len(request.prompt) // 4) + len(self.tokens[name]) // 4 + self.random.randrange(3)
        self.drain(destination)
        lease = source.scheduler.leases.find(key)
        kept = bool(lease.blocks) or not held.computed
        if how == "there" and kept and destination.scheduler.lease(key, request.service, blocks):
            destination.carry_out(destination.scheduler.pending_plan())
            # A compaction at the destination, or none: what is read is where the tables say.
            content = source.read(request.service, lease.blocks)
            target = destination.scheduler.leases.find(key).blocks
            missing = len(content) - len(target)
            if missing <= 0 or destination.scheduler.lease(key, request.service, missing):
                destination.carry_out(destination.scheduler.pending_plan())
                target = destination.scheduler.leases.find(key).blocks
                destination.write(request.service, target[: len(content)], content)
                plan = destination.scheduler.join(key, request, held.computed, destination.now_ns)
                destination.carry_out(plan)
                self.hosts[name] = destination
                source.scheduler.release(key)
                source.check_tables()
                return
            destination.scheduler.release(key)
        source.scheduler.release(key)
        self.hosts[name] = destination
        destination.submit(request)


@pytest.mark.parametrize("preset", each_nth(PRESETS, 4, at=3))
@given(seed=st.integers(0, 2**32), depths=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2))))
@settings(max_examples=examples(25), deadline=None)
def test_migration_with_kv_changes_no_output(preset, seed, depths):
    """Between pools that are too small for all, so that requests are preempted and blocks are moved."""
    random = Random(seed)
    requests = [make_some_request(random, number) for number in range(8)]
    expected = run(make_scheduler(make_pool(60, per_merged={"a": 1, "b": 2})), requests)
    engines = (
        engine_of(preset, depths[0], 7 * SECOND),
        engine_of(preset, depths[1], 5_000 * SECOND, blocks=20),
    )
    migrations = RandomMigrations(random, engines)
    coming, rooms = deque(requests), set()
    cancelled = set()
    while coming or migrations.held or len(migrations.ends) < len(requests):
        if coming and random.random() < 0.5:
            migrations.submit(random.choice(engines), coming.popleft())
        migrations.step()
        for name in [
            name for name in migrations.hosts if name not in migrations.ends and name not in migrations.held
        ]:
            if random.random() < 0.1:
                migrations.hold(name)
            elif random.random() < 0.01:
                engine = migrations.hosts[name]
                event = engine.scheduler.cancel(migrations.current_id(name), engine.now_ns)
                migrations.take(engine, [] if event is None else [event])
                cancelled.add(name)
        for name in list(migrations.held):
            if random.random() < 0.3:
                migrations.settle(name)
        change_rooms(random, migrations, rooms)
    for engine, key in list(rooms):
        engine.scheduler.release(key)
    for engine in engines:
        engine.drain()
        assert len(engine.scheduler.leases) == 0
        assert engine.scheduler.leases.demand == 0
        engine.check_empty()
    for name, tokens in migrations.tokens.items():
        if name in cancelled:
            assert tokens == expected.tokens[name][: len(tokens)]
        else:
            assert tokens == expected.tokens[name]
            assert migrations.ends[name] == expected.ends[name]


def change_rooms(random: Random, migrations: RandomMigrations, rooms: set) -> None:
    """Keep room for requests that never come, and give it up again."""
    if random.random() < 0.2:
        engine, key = random.choice(migrations.engines), f"room{len(migrations.tokens)}-{random.random()}"
        migrations.drain(engine)
        if engine.scheduler.lease(key, random.choice("ab"), random.randint(1, 12)):
            engine.carry_out(engine.scheduler.pending_plan())
            rooms.add((engine, key))
    for engine, key in list(rooms):
        if random.random() < 0.1:
            engine.scheduler.release(key)
            rooms.discard((engine, key))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_a_split_pool_keeps_leases_too(seed):
    random = Random(seed)
    requests = [replace(make_some_request(random, number), service="a") for number in range(6)]
    expected = run(make_scheduler(make_pool(60)), requests)
    engines = (Engine(make_scheduler(split_pool(20)), 0), Engine(make_scheduler(split_pool(14)), SECOND))
    migrations = RandomMigrations(random, engines)
    for request in requests:
        migrations.submit(random.choice(engines), request)
    while migrations.held or len(migrations.ends) < len(requests):
        migrations.step()
        for name in [
            name for name in migrations.hosts if name not in migrations.ends and name not in migrations.held
        ]:
            if random.random() < 0.2:
                migrations.hold(name)
        for name in list(migrations.held):
            if random.random() < 0.5:
                migrations.settle(name)
    assert migrations.tokens == expected.tokens
    for engine in engines:
        engine.drain()
        engine.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_hold_and_resume_change_no_plan(depth, prefix_caching):
    """Alone in its batch, after every step."""
    request = make_request(13, 9, id="r", max_tokens=9)
    pool = make_pool(20, prefix_caching=prefix_caching)
    plain = run(make_scheduler(pool, depth=depth, max_batched_tokens=6), [request])
    engine = Engine(
        make_scheduler(make_pool(20, prefix_caching=prefix_caching), depth=depth, max_batched_tokens=6)
    )
    engine.submit(request)
    plans, tokens = [], []
    schedule = engine.scheduler.schedule

    def noted(now_ns):
        plan = schedule(now_ns)
        if hasattr(plan, "seq_ids"):
            plans.append(plan)
        return plan

    engine.scheduler.schedule = noted
    while engine.scheduler.unfinished:
        tokens += [token for event in engine.step() for token in event.tokens]
        engine.drain()
        tokens += [token for event in engine.take_events() for token in event.tokens]
        if engine.scheduler.unfinished:
            held = engine.scheduler.hold("m", "r", engine.now_ns)
            assert held is not None
            engine.carry_out(engine.scheduler.resume("m", engine.now_ns))
    assert tokens == plain.tokens["r"]
    shapes = [(plan.new_tokens, plan.sampled) for plan in plans]
    assert shapes == [(plan.new_tokens, plan.sampled) for plan in plain.plans]
    engine.check_empty()


def test_leases_count_against_memory_and_running_requests():
    engine = Engine(make_scheduler(make_pool(10), max_running=2))
    scheduler = engine.scheduler
    assert not scheduler.lease("m", "a", 11)
    assert not scheduler.lease("m", "none", 1)
    assert scheduler.lease("m", "a", 6)
    assert scheduler.leases.demand == 6
    engine.submit(make_request(20, 3, id="large"))
    assert not engine.step(), "there is room for four blocks"
    assert scheduler.waiting == 1
    engine.submit(make_request(8, 3, id="small"))
    assert scheduler.lease("m2", "a", 1)
    assert not scheduler.lease("m3", "a", 1), "two may run, or come"
    assert scheduler.lease("m2", "a", 1), "a lease may grow"
    scheduler.release("m")
    scheduler.release("m2")
    scheduler.release("m2")
    while scheduler.unfinished:
        engine.step()
    engine.check_empty()


def test_leases_alone_do_not_delay_admission():
    """Without running requests there are no steps, so the next admission would never come."""
    admission = Conservative(overcommit=1.0, admit_every=10)
    engine = Engine(make_scheduler(make_pool(20), admission=admission))
    for name in ("first", "second"):
        engine.submit(make_request(5, 3, id=name, max_tokens=3))
        while engine.scheduler.unfinished:
            engine.step()
            assert engine.scheduler.running or not engine.scheduler.waiting
        engine.scheduler.lease("m", "a", 4)
    engine.scheduler.release("m")
    engine.check_empty()


def test_a_starved_request_behind_leases_is_not_retried_all_the_time():
    engine = Engine(make_scheduler(make_pool(10), starvation_s=1.0, order="fcfs"))
    scheduler = engine.scheduler
    assert scheduler.lease("m", "a", 8)
    engine.submit(make_request(12, 3, id="r", max_tokens=3))
    assert scheduler.schedule(0) == Idle(SECOND)
    assert scheduler.schedule(2 * SECOND) == Idle(None)
    scheduler.release("m")
    assert isinstance(scheduler.schedule(2 * SECOND), StepPlan)


def test_a_held_request_may_grow_as_before():
    engine = Engine(make_scheduler(make_pool(10)))
    engine.submit(make_request(12, 20, id="r", max_tokens=20))
    engine.step()
    engine.drain()
    assert engine.scheduler.hold("m", "r", engine.now_ns) is not None
    assert engine.scheduler.max_committed_tokens("a") == 32
    engine.scheduler.release("m")
    assert engine.scheduler.max_committed_tokens("a") == 0


def test_what_cannot_join_changes_nothing():
    engine = Engine(make_scheduler(make_pool(10), context=40))
    scheduler = engine.scheduler
    assert scheduler.lease("m", "a", 2)
    request = make_request(7, 3, id="r", max_tokens=3)
    for key, wanted, computed in (
        ("none", request, 3),
        ("m", request, 7),
        ("m", request, -1),
        ("m", replace(request, prompt=[1] * 30), 9),
        ("m", replace(request, prompt=[1] * 50), 3),
        ("m", replace(request, service="b"), 3),
    ):
        with pytest.raises(InvalidRequest):
            scheduler.join(key, wanted, computed, 0)
    assert len(scheduler.leases) == 1
    assert not scheduler.unfinished
    engine.carry_out(scheduler.join("m", request, 0, 0))
    with pytest.raises(InvalidRequest, match="no room"):
        scheduler.join("m", replace(request, id="s"), 0, 0)
    while scheduler.unfinished:
        engine.step()
    engine.check_empty()


def test_no_migration_with_slices():
    engine = Engine(make_scheduler(make_pool(20), admission=Slice(tokens=4)))
    engine.submit(make_request(10, 8, id="r"))
    engine.step()
    engine.drain()
    assert not engine.scheduler.lease("m", "a", 1)
    assert engine.scheduler.hold("m", "r", 0) is None
    while engine.scheduler.unfinished:
        engine.step()


def test_a_request_running_alone_revokes_leases_newest_first():
    engine = Engine(make_scheduler(make_pool(10)))
    scheduler = engine.scheduler
    engine.submit(make_request(8, 24, id="r", max_tokens=24))
    engine.step()
    assert scheduler.lease("old", "a", 3)
    assert scheduler.lease("new", "a", 2)
    held = []
    while scheduler.unfinished:
        engine.step()
        held.append(["old" in scheduler.leases, "new" in scheduler.leases])
    assert held[0] == [True, True]
    assert [True, False] in held
    scheduler.release("old")
    engine.check_empty()


def test_a_starved_request_does_not_take_leased_blocks():
    """It waits until they are given up, and others go on or come back meanwhile."""
    engine = Engine(make_scheduler(make_pool(10), starvation_s=3e-6, order="fcfs"))
    scheduler = engine.scheduler
    assert scheduler.lease("m", "a", 4)
    requests = [make_request(8, 12, id=f"r{number}", max_tokens=12) for number in range(2)]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.submit(make_request(30, 4, id="large", max_tokens=4))
    ended = []
    for _ in range(200):
        ended += [event.request_id for event in engine.step() if event.finish]
    assert sorted(ended) == ["r0", "r1"]
    assert "m" in scheduler.leases
    scheduler.release("m")
    while scheduler.unfinished:
        ended += [event.request_id for event in engine.step() if event.finish]
    assert ended[-1] == "large"
    engine.check_empty()
