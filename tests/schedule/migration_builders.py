"""Schedulers with checking executors, for the migration of requests between them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random

from replay_executor import ReplayExecutor
from schedule_builders import make_pool, make_request, make_scheduler

from shoal.config import PRESETS
from shoal.core import Idle, Request, StepPlan, TokenEvent
from shoal.kvcache import BlockPool
from shoal.schedule import Scheduler


class Engine:
    """A scheduler with a checking executor and its own clock."""

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
        """Schedule up to ``depth`` plans, and complete the oldest; returns events."""
        while len(self.flights) < self.scheduler.options.max_in_flight:
            plan = self.scheduler.schedule(self.now_ns)
            self.pool.check_integrity()
            if isinstance(plan, Idle):
                assert self.scheduler.schedule(self.now_ns) == plan, "a second schedule() has another result"
                break
            self.flights.append((plan, self.executor.run(plan)))
        if self.flights:
            self.complete()
        else:
            held_up = len(self.scheduler.leases) > 0
            assert self.events or not self.scheduler.unfinished or held_up, "the scheduler is stuck"
        return self.take_events()

    def complete(self) -> None:
        """Complete the oldest plan."""
        plan, result = self.flights.popleft()
        self.now_ns += result.duration_ns
        self.events += self.scheduler.update(plan, result, self.now_ns)
        self.pool.check_integrity()
        if not self.flights:
            self.check_tables()

    def take_events(self) -> list[TokenEvent]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events

    def drain(self) -> None:
        """Complete all plans in flight, and execute pending changes."""
        while self.flights:
            self.complete()
        self.carry_out(self.scheduler.pending_plan())

    def carry_out(self, plan: StepPlan) -> None:
        """Execute a plan without rows."""
        assert not self.flights
        assert not plan.seq_ids
        self.executor.drop(plan)
        self.check_tables()

    def check_tables(self) -> None:
        """Every block reference belongs to a block table or a lease."""
        scheduler = self.scheduler
        self.pool.check_integrity(
            {
                name: [request.block_ids for request in state.running.requests]
                + [lease.blocks for lease in scheduler.leases.of_service(name)]
                for name, state in scheduler.services.items()
            }
        )

    def read(self, service: str, blocks: Sequence[int]) -> list[list[int] | None]:
        """KV as sent to another engine."""
        return [self.executor.memory.get((service, block)) for block in blocks]

    def write(self, service: str, blocks: Sequence[int], content: Sequence[list[int] | None]) -> None:
        """KV received from another engine."""
        for block, slots in zip(blocks, content, strict=True):
            self.executor.write(service, block, slots)

    def check_empty(self) -> None:
        assert all(self.pool.live_blocks(service) == 0 for service in self.pool.layout.services)
        host = self.scheduler.host  # type: ignore[attr-defined]
        assert host is None or all(not host.live_blocks(service) for service in host.layout.services)


def engine_of(preset: str, depth: int, clock_ns: int, blocks: int = 14) -> Engine:
    chosen = replace(PRESETS[preset].scheduler, depth=depth, max_batched_tokens=24)
    options = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    return Engine(make_scheduler(make_pool(blocks, per_merged={"a": 1, "b": 2}), **options), clock_ns)


def make_some_request(random: Random, number: int) -> Request:
    """A request of either service, whose prompt may share a prefix with others."""
    own = [10_000 + 100 * number + at for at in range(random.randint(1, 12))]
    return make_request(
        [*range(random.choice((0, 4, 8))), *own],
        random.choice((None, random.randint(1, 16))),
        max_tokens=random.randint(1, 16),
        service=random.choice("ab"),
        id=f"q{number}",
    )
