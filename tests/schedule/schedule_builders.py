"""Small builders: pools, requests, schedulers, and an executor that remembers what it was told."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from shoal.core import (
    BlockCopy,
    FinishReason,
    Idle,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenEvent,
    derive_seed,
)
from shoal.kvcache import BlockPool, KVShape, LayerShape, PoolLayout, ServiceLayout
from shoal.schedule import (
    ORDERS,
    Admission,
    Aggressive,
    Order,
    Scheduler,
    SchedulerOptions,
    ServiceLimits,
    describe,
)

STEP_NS = 1_000
_numbers = count()


def make_pool(
    blocks: int = 64,
    *,
    block_size: int = 4,
    per_merged: Mapping[str, int] | None = None,
    prefix_caching: bool = True,
) -> BlockPool:
    """A pool of ``blocks`` merged blocks; ``per_merged``: how many blocks of each service fit in one."""
    services = {
        name: ServiceLayout(
            service=name,
            shape=KVShape(dtype="float32", layers=(LayerShape(1, 8 + number, 8),)),
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
    """A request with a prompt of so many tokens that no other prompt shares, or with the given tokens."""
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


def make_scheduler(
    pool: BlockPool | None = None,
    *,
    context: int = 1_000,
    eos: tuple[int, ...] = (),
    admission: Admission | None = None,
    order: str | Order = "fcfs",
    host_blocks: int | None = None,
    execution_s: float | None = None,
    **options: object,
) -> Scheduler:
    """A scheduler of ``pool``'s services; ``host_blocks``: merged blocks in host memory, for swapping."""
    pool = pool or make_pool()
    limits = {name: ServiceLimits(context, eos, execution_s=execution_s) for name in pool.layout.services}
    options = {
        "victim": "newest",
        "preemption_mode": "recompute",
        "preempt_for_waiting": False,
        "admission": admission or Aggressive(watermark=1.0),
        "order": ORDERS[order]() if isinstance(order, str) else order,
        **options,
    }
    host = None
    if options.get("preemption_mode") == "swap":
        layout = replace(pool.layout, merged_blocks=pool.capacity if host_blocks is None else host_blocks)
        host = BlockPool(layout, prefix_caching=False)
    scheduler = Scheduler(pool, limits, SchedulerOptions(**options), host)  # type: ignore[arg-type]
    scheduler.pool = pool  # type: ignore[attr-defined]
    scheduler.host = host  # type: ignore[attr-defined]
    return scheduler


@dataclass
class _Sequence:
    service: str
    tokens: list[int]
    computed: int
    table: list[int]


class ReplayExecutor:
    """Carries out plans on a pretended memory and objects to whatever a real executor could not do.

    A slot of KV holds a digest of all tokens up to its own; before a sequence computes tokens, the digests of
    all earlier ones must lie in its blocks. The token sampled is a function of the digest alone, so
    output depends on the prompt and on nothing else.
    """

    def __init__(self, pool: BlockPool, vocabulary: int = 10_000) -> None:
        self.pool = pool
        self.vocabulary = vocabulary
        self.sequences: dict[int, _Sequence] = {}
        self.computed_tokens = 0
        self.seen: set[int] = set()
        self.memory: dict[tuple[str, int], list[int]] = {}
        self.host: dict[tuple[str, int], list[int]] = {}
        self.copied = Counter[str]()
        self.owner: dict[int, str] = {}
        self.users: Counter[tuple[str, int]] = Counter()

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.swap_out_copies:
            self._copy(copy)
        # A copy may write where a sequence that leaves in this plan used to be.
        for number in plan.left:
            gone = self.sequences.pop(number)
            self.users.subtract((gone.service, block) for block in gone.table)
        for number, table in plan.moved:
            one = self.sequences[number]
            assert len(table) == len(one.table)
            self.users.subtract((one.service, block) for block in one.table)
            one.table = list(table)
            self.users.update((one.service, block) for block in table)
        for copy in plan.copies:
            self._copy(copy)
        for one in plan.joined:
            assert one.sequence not in self.seen, "a sequence number was used twice"
            self.seen.add(one.sequence)
            assert one.computed < len(one.tokens), "nothing is left to compute"
            self.sequences[one.sequence] = _Sequence(
                plan.service, list(one.tokens), one.computed, list(one.blocks)
            )
            self.users.update((plan.service, block) for block in one.blocks)
        for number, blocks in plan.grown:
            assert number not in {one.sequence for one in plan.joined}
            self.sequences[number].table += blocks
            self.users.update((plan.service, block) for block in blocks)
        assert len(set(plan.seq_ids)) == len(plan.seq_ids)
        tokens = []
        for row, (number, new) in enumerate(zip(plan.seq_ids, plan.new_tokens, strict=True)):
            digest = self._forward(plan.service, self.sequences[number], new)
            if row in plan.sampled:
                one = self.sequences[number]
                assert one.computed == len(one.tokens), "a token is sampled before its input is computed"
                one.tokens.append(digest % self.vocabulary)
                tokens.append(digest % self.vocabulary)
        return StepResult.of_step(tokens, STEP_NS)

    def _copy(self, copy: BlockCopy) -> None:
        assert not (copy.source_host and copy.target_host)
        source = self.host if copy.source_host else self.memory
        target = self.host if copy.target_host else self.memory
        if not copy.target_host:
            self._own(copy.service, copy.target)
        # A block that was reserved and not yet written has nothing to copy.
        target.pop((copy.service, copy.target), None)
        if (copy.service, copy.source) in source:
            target[copy.service, copy.target] = list(source[copy.service, copy.source])
        self.copied["in" if copy.source_host else "out" if copy.target_host else "within"] += 1

    def _forward(self, service: str, one: _Sequence, new: int) -> int:
        size = self.pool.block_size
        assert one.service == service
        assert new >= 1
        assert one.computed + new <= len(one.tokens), "more tokens than known"
        assert one.computed + new <= len(one.table) * size, "more tokens than blocks"
        digest = 0
        for at, token in enumerate(one.tokens[: one.computed + new]):
            digest = derive_seed(digest, token)
            block, slot = one.table[at // size], at % size
            if at < one.computed:
                assert self.owner[self._merged(service, block)] == service
                assert self.memory[service, block][slot] == digest, "KV of another prefix"
                continue
            assert self.users[service, block] == 1, "writes into a block of two tables"
            self._own(service, block)
            self.memory.setdefault((service, block), [0] * size)[slot] = digest
        one.computed += new
        self.computed_tokens += new
        return digest

    def _merged(self, service: str, block: int) -> int:
        return block // self.pool.layout.services[service].blocks_per_merged

    def _own(self, service: str, block: int) -> None:
        """A merged block that changes hands loses what was in it."""
        merged = self._merged(service, block)
        before = self.owner.get(merged)
        if before is not None and before != service:
            per_merged = self.pool.layout.services[before].blocks_per_merged
            for old in range(merged * per_merged, (merged + 1) * per_merged):
                assert self.users[before, old] == 0, "a merged block has two owners"
                self.memory.pop((before, old), None)
        self.owner[merged] = service


@dataclass
class Run:
    """What happened: every plan, and for every request its tokens and how it ended."""

    plans: list[StepPlan] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    computed_tokens: int = 0
    copied: Counter[str] = field(default_factory=Counter)

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event.request_id} has an event after its end"
            self.tokens.setdefault(event.request_id, []).extend(event.tokens)
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
    vocabulary: int = 10_000,
    limit: int = 20_000,
) -> Run:
    """Submit ``requests`` and go on until all have ended; ``before_step`` is told how many plans were
    made, and returns whether it has more to submit."""
    pool: BlockPool = scheduler.pool  # type: ignore[attr-defined]
    options = scheduler.options
    executor = ReplayExecutor(pool, vocabulary)
    done = Run()
    for request in requests:
        scheduler.submit(request, 0)
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    now = 0
    while scheduler.unfinished or flights or before_step is not None:
        assert len(done.plans) < limit, "no end in sight"
        more = before_step(len(done.plans), done) if before_step is not None else False
        plan = scheduler.schedule(now)
        pool.check_integrity()
        if isinstance(plan, StepPlan):
            assert sum(plan.new_tokens) <= options.max_batched_tokens
            assert len(plan.seq_ids) <= options.max_running
            assert plan.seq_ids
            done.plans.append(plan)
            flights.append((plan, executor.run(plan)))
            running = sum(service.running for service in scheduler.stats().services.values())
            assert running <= options.max_running
        else:
            assert isinstance(plan, Idle)
            assert scheduler.schedule(now) == plan, "looking again changed something"
            if not flights:
                assert not scheduler.unfinished, "the scheduler is stuck"
                if not more:
                    break
                continue
        if isinstance(plan, Idle) or len(flights) == options.depth:
            now += STEP_NS
            done.take(scheduler.update(*flights.popleft(), now))
            pool.check_integrity()
    assert scheduler.in_flight == 0
    assert all(pool.live_blocks(service) == 0 for service in pool.layout.services), "memory is lost"
    host = scheduler.host  # type: ignore[attr-defined]
    assert host is None or all(not host.live_blocks(service) for service in host.layout.services)
    done.computed_tokens = executor.computed_tokens
    done.copied = executor.copied
    return done
