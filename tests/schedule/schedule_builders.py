"""Small builders: pools, requests and their states, schedulers, and runs of them."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from bookkeeping import Bookkeeping
from replay_executor import STEP_NS, ReplayExecutor

from shoal.core import (
    NO_GOALS,
    SLO,
    FinishReason,
    Idle,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    SyntheticPrompt,
    TokenEvent,
)
from shoal.kvcache import BlockPool, KVShape, LayerShape, PoolLayout, ServiceLayout
from shoal.schedule import (
    ORDERS,
    Admission,
    Aggressive,
    Order,
    RequestState,
    Scheduler,
    SchedulerOptions,
    ServiceLimits,
    WeightsOptions,
    describe,
)
from shoal.schedule.request_state import new_request_state

SECOND = 1_000_000_000
_numbers = count()


def make_pool(
    blocks: int = 64,
    *,
    block_size: int = 4,
    per_merged: Mapping[str, int] | None = None,
    prefix_caching: bool = True,
    alike: bool = False,
) -> BlockPool:
    """A pool of ``blocks`` merged blocks.

    per_merged: blocks of each service in a merged block. alike: all blocks have the same shape.
    """
    services = {
        name: ServiceLayout(
            service=name,
            shape=KVShape(dtype="float32", layers=(LayerShape(1, 8 + (0 if alike else number), 8),)),
            stride_bytes=12 * 256 // n,
            blocks_per_merged=n,
            layers=(),
        )
        for number, (name, n) in enumerate((per_merged or {"a": 1}).items())
    }
    return BlockPool(PoolLayout("merged", block_size, 12 * 256, blocks, services), prefix_caching)


def make_request(
    prompt: int | Sequence[int] = 10,
    output: int | None = 5,
    *,
    id: str | None = None,
    service: str = "a",
    **sampling: object,
) -> Request:
    """A request with a unique prompt of ``prompt`` tokens, or with the given tokens."""
    number = next(_numbers)
    tokens = [1_000 + number * 1_000 + at for at in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        id=id or f"r{number}",
        service=service,
        prompt=tokens,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        true_output_tokens=output,
        seed=number,
    )


def make_state(
    service: str = "a",
    *,
    number: int | None = None,
    prompt: int = 10,
    output: int | None = None,
    service_time_s: float = 0.0,
    generated: int = 0,
    predicted: int = 1,
    max_new_tokens: int = 1_000,
    arrival_s: float = 0.0,
    slo: SLO = NO_GOALS,
    priority: int = 0,
) -> RequestState:
    """The state of a waiting request; ``output``: its true length."""
    number = next(_numbers) if number is None else number
    request = Request(
        id=f"r{number}",
        service=service,
        prompt=SyntheticPrompt(prompt),
        arrival_ns=round(arrival_s * SECOND),
        true_output_tokens=output,
        priority=priority,
    )
    state = new_request_state(request, number, max_new_tokens, ())
    state.service_time_ns = round(service_time_s * SECOND)
    state.num_generated = generated
    state.predicted_tokens = predicted
    state.slo = slo
    return state


def make_scheduler(
    pool: BlockPool | None = None,
    *,
    context: int = 1_000,
    eos: tuple[int, ...] = (),
    admission: Admission | None = None,
    order: str | Order = "fcfs",
    host_blocks: int | None = None,
    execution_s: float | Mapping[str, float] | None = None,
    weights: Mapping[str, str] | None = None,
    memory: WeightsOptions | None = None,
    weight_bytes: int | Mapping[str, int] = 1,
    pinned: Collection[str] = (),
    starvation_of: Mapping[str, float] | None = None,
    **options: object,
) -> Scheduler:
    """A scheduler of ``pool``'s services.

    host_blocks: merged blocks in host memory, for swapping. execution_s: of all services, or by service.
    weights: by service; the other services have their own. memory: for weights; weight_bytes: of each
    service, or by service. pinned: services whose weights never leave. starvation_of: seconds, of
    services that have a threshold of their own.
    """
    pool = pool or make_pool()
    limits = {
        name: ServiceLimits(
            context,
            eos,
            execution_s=execution_s[name] if isinstance(execution_s, Mapping) else execution_s,
            weights=(weights or {}).get(name),
            weight_bytes=weight_bytes[name] if isinstance(weight_bytes, Mapping) else weight_bytes,
            pinned=name in pinned,
            starvation_s=(starvation_of or {}).get(name),
        )
        for name in pool.layout.services
    }
    options = {
        "victim": "newest",
        "preemption_mode": "recompute",
        "preempt_for_waiting": "never",
        "max_token_gap_s": 1e6,
        "max_running": 256,
        "admission": admission or Aggressive(watermark=1.0),
        "order": ORDERS[order]() if isinstance(order, str) else order,
        **options,
    }
    host = None
    if options.get("preemption_mode") == "swap":
        layout = replace(pool.layout, merged_blocks=pool.capacity if host_blocks is None else host_blocks)
        host = BlockPool(layout, prefix_caching=False)
    scheduler = Scheduler(
        pool,
        limits,
        SchedulerOptions(**options),  # type: ignore[arg-type]
        host,
        weights=memory,
    )
    scheduler.pool = pool  # type: ignore[attr-defined]
    scheduler.host = host  # type: ignore[attr-defined]
    return scheduler


@dataclass
class Run:
    """Record of a run: plans, and the tokens and end of each request."""

    plans: list[StepPlan] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    resumed_with: dict[str, int] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    computed_tokens: int = 0
    failed: list[StepPlan] = field(default_factory=list)
    copied: Counter[str] = field(default_factory=Counter)

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event.request_id} has an event after its end"
            tokens = self.tokens.setdefault(event.request_id, [])
            resumed_with = self.resumed_with.setdefault(event.request_id, event.position)
            assert event.position == resumed_with + len(tokens)
            tokens.extend(event.tokens)
            if event.finish is not None:
                self.ends[event.request_id] = event.finish

    @property
    def log(self) -> list[str]:
        return [describe(plan) for plan in self.plans]


def run(
    scheduler: Scheduler,
    requests: Iterable[Request] = (),
    *,
    before_step: Callable[[int, Run], bool | None] | None = None,
    vocabulary: int | None = 10_000,
    stops: Sequence[int] = (),
    max_iterations: int = 1,
    fails: Callable[[StepPlan], bool] | None = None,
    postpones: Callable[[int], bool] = lambda seq_id: False,
    is_ready: Callable[[int], bool] = lambda seq_id: True,
    limit: int = 20_000,
) -> Run:
    """Submit ``requests`` and run until all have ended, checking the rows of running batches after each step.

    before_step: called with the number of plans so far; returns whether it will submit more. vocabulary,
    stops: of the executor. max_iterations: of one plan. fails: whether the forward pass of a plan fails.
    postpones: whether the executor cannot sample for a sequence yet; is_ready: whether it can by now, called
    between plans, but not when nothing else is left to do.
    """
    pool: BlockPool = scheduler.pool  # type: ignore[attr-defined]
    options = scheduler.options
    executor = ReplayExecutor(pool, vocabulary, stops, postpones)
    books = Bookkeeping(scheduler, executor)
    done = Run()
    for request in requests:
        scheduler.submit(request, 0)
    flights: deque[tuple[StepPlan, StepResult | None]] = deque()
    now = 0
    while scheduler.unfinished or flights or before_step is not None:
        assert len(done.plans) < limit, "no end in sight"
        more = before_step(len(done.plans), done) if before_step is not None else False
        ready = [seq_id for seq_id in scheduler.postponed if is_ready(seq_id)]
        scheduler.ready(ready)
        books.ready(ready)
        left_out = set(scheduler.postponed)
        plan = _next_plan(scheduler, now, max_iterations)
        done.take(scheduler.take_refused())
        pool.check_integrity()
        if isinstance(plan, StepPlan):
            assert sum(plan.new_tokens) <= options.max_batched_tokens
            assert len(plan.seq_ids) <= scheduler.max_running
            assert plan.seq_ids
            assert left_out.isdisjoint(plan.seq_ids), "a postponed sequence is part of a plan"
            done.plans.append(plan)
            result = _execute(executor, plan, flights, fails)
            flights.append((plan, result))
            books.planned(plan)
            if result is not None and len(result.tokens) == plan.iterations and _settled(flights):
                books.compare(done.tokens)
            assert sum(len(state.running) for state in scheduler.services.values()) <= scheduler.max_running
        else:
            assert isinstance(plan, Idle)
            assert scheduler.schedule(now) == plan, "a second schedule() has another result"
            if not flights and scheduler.postponed:
                ready = scheduler.postponed
                scheduler.ready(ready)
                books.ready(ready)
                continue
            if not flights:
                assert not scheduler.unfinished, "the scheduler is stuck"
                if not more:
                    break
                continue
        if isinstance(plan, Idle) or len(flights) == options.max_in_flight:
            updated, result = flights.popleft()
            if result is None:
                flights.clear()
                done.failed.append(updated)
                now += STEP_NS
                done.take(scheduler.abandon("out of memory", now))
                books.abandoned()
            else:
                now += result.duration_ns
                done.take(scheduler.update(updated, result, now))
                books.updated(updated, result, now, done.tokens)
            pool.check_integrity()
            if _settled(flights):
                books.compare(done.tokens)
    assert scheduler.in_flight == 0
    assert all(pool.live_blocks(service) == 0 for service in pool.layout.services), "memory is lost"
    host = scheduler.host  # type: ignore[attr-defined]
    assert host is None or all(not host.live_blocks(service) for service in host.layout.services)
    done.computed_tokens = executor.computed_tokens
    done.copied = executor.copied
    return done


def _settled(flights: Iterable[tuple[StepPlan, StepResult | None]]) -> bool:
    """Whether the plans in flight had complete results."""
    return all(result is not None and not result.postponed for _, result in flights)


def _execute(
    executor: ReplayExecutor,
    plan: StepPlan,
    flights: Sequence[tuple[StepPlan, StepResult | None]],
    fails: Callable[[StepPlan], bool] | None,
) -> StepResult | None:
    """The result of a plan; None if it fails, or if a plan before it in flight has failed."""
    failing = fails is not None and fails(plan)
    if flights and flights[-1][1] is None:
        executor.drop(plan)
        return None
    if failing:
        executor.fail(plan)
        return None
    return executor.run(plan)


def _next_plan(scheduler: Scheduler, now_ns: int, max_iterations: int) -> StepPlan | Idle:
    """A plan with at most ``max_iterations`` iterations that need no decision."""
    if max_iterations > 1:
        run = scheduler.decode_runs.next_run(now_ns, max_iterations)
        if run is not None:
            steps = min(run.steps, -((now_ns - run.until_ns) // STEP_NS))
            return scheduler.decode_runs.commit(run, steps)[0]
    return scheduler.schedule(now_ns)
