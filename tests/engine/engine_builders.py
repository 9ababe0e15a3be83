"""Builders for tests of the engine: a tokenizer of bytes and an executor without a model."""

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from shoal.core import (
    Arrival,
    ModelUnsupported,
    Request,
    SamplingParams,
    Service,
    StepPlan,
    StepResult,
    derive_seed,
)
from shoal.engine.build import describe_service
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.options import EngineOptions
from shoal.engine.service_changes import ServiceChanges
from shoal.execute.protocol import Interrupted, never
from shoal.kvcache.layout import PoolLayout, plan_layout
from shoal.kvcache.layout_changes import keeps_blocks
from shoal.kvcache.options import KVCacheOptions
from shoal.kvcache.pool import BlockPool
from shoal.kvcache.shape import KVShape, LayerShape
from shoal.schedule import Scheduler, SchedulerOptions, ServiceLimits

EOS = 256
VOCAB = 300
FAILING_TOKEN = 299
BUILDER = "engine_builders:build_fake"
SHAPE = KVShape(dtype="float32", layers=(LayerShape(kv_heads=1, key_dim=8, value_dim=8),))
LARGE_SHAPE = KVShape(dtype="float32", layers=(LayerShape(kv_heads=11, key_dim=8, value_dim=8),) * 3)


class ByteTokenizer:
    """Token i < 256 is byte i; the others are special and have no text."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def next_token(
    known: Sequence[int], outputs: int, sampling: SamplingParams, seed: int, eos_every: int
) -> int:
    """The fake model: a letter, or sometimes end of sequence, as a function of the known tokens."""
    keys = [len(known), *known[-4:]]
    draw = derive_seed(0 if sampling.greedy else seed, *keys)
    if eos_every and outputs >= sampling.min_tokens and draw % eos_every == 0:
        return EOS
    return 97 + (draw >> 20) % 26


def expected_tokens(
    request: Request, limit: int, eos_every: int = 0, stop: Callable[[list[int]], bool] | None = None
) -> list[int]:
    """Output of the fake model for a request that runs alone."""
    assert isinstance(request.prompt, Sequence)
    known = list(request.prompt)
    output: list[int] = []
    while len(output) < limit:
        token = next_token(known, len(output), request.sampling, request.seed, eos_every)
        known.append(token)
        output.append(token)
        if token == EOS and not request.sampling.ignore_eos:
            break
        if stop is not None and stop(output):
            break
    return output


class _Sequence:
    def __init__(self, joined) -> None:
        self.tokens = list(joined.tokens)
        self.prompt_tokens = joined.prompt_tokens
        self.computed = joined.computed
        self.blocks = list(joined.blocks)
        self.sampling = joined.sampling
        self.seed = joined.seed


class FakeExecutor:
    """Keeps each sequence's state from the plans' deltas, and a pool that holds tokens instead of KV.

    Before it samples it reads back from the pool every token that the sequence has computed.
    """

    def __init__(self, layout: PoolLayout, eos_every: int = 0, step_s: float = 0.0) -> None:
        self.layout = layout
        self.eos_every = eos_every
        self.step_s = step_s
        self.sequences: dict[int, _Sequence] = {}
        self.owner: dict[int, str] = {}
        self.memory: dict[tuple[str, int], dict[int, int]] = {}
        self.plans: deque[StepPlan] = deque()
        self.steps = 0
        self.most_in_flight = 0
        self.closed = False
        self.fetches = 0
        self.failing_fetches = 0
        """How many of the first fetches fail."""
        self.arrived: list[Arrival] = []

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        self.plans.append(plan)
        self.interrupted = interrupted
        self.most_in_flight = max(self.most_in_flight, len(self.plans))

    def collect(self) -> StepResult:
        plan = self.plans.popleft()
        for copy in plan.copies:
            self._own(copy.service, copy.target)
            self.memory[copy.service, copy.target] = dict(self.memory[copy.service, copy.source])
        for name in plan.fetch:
            self.fetches += 1
            failed = "the disk is gone" if self.fetches <= self.failing_fetches else None
            self.arrived.append(Arrival(name, FETCH_S, failed))
        for number in plan.left:
            del self.sequences[number]
        for joined in plan.joined:
            assert joined.seq_id not in self.sequences
            self.sequences[joined.seq_id] = _Sequence(joined)
        for number, blocks in plan.grown:
            self.sequences[number].blocks += blocks
        if not plan.seq_ids:
            return StepResult([()], [1])
        tokens = [self._iterate(plan)]
        while len(tokens) < plan.iterations and EOS not in tokens[-1] and not self.interrupted():
            tokens.append(self._iterate(plan))
        computed_ns = 1000 * sum(plan.new_tokens) if self.step_s else 0
        return StepResult(tokens, [1 + round(self.step_s * 1e9) + computed_ns] * len(tokens))

    def _iterate(self, plan: StepPlan) -> list[int]:
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        for number, count in zip(plan.seq_ids, plan.new_tokens, strict=True):
            self._compute(plan.service, self.sequences[number], count)
        return [self._sample(plan.service, self.sequences[plan.seq_ids[index]]) for index in plan.sampled]

    def arrivals(self) -> Sequence[Arrival]:
        """Every fetch has ended as soon as it is looked at."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        assert not self.plans, "KV moves while a plan is in flight"
        held = [self.memory.get((service, block), {}) for block in blocks]
        tokens = [tokens.get(slot, -1) for tokens in held for slot in range(self.layout.block_size)]
        return memoryview(struct.pack(f"<{len(tokens)}i", *tokens))

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        assert not self.plans, "KV moves while a plan is in flight"
        size = self.layout.block_size
        if content.nbytes != 4 * size * len(blocks):
            raise ValueError(f"{len(blocks)} blocks of {size} tokens are not in {content.nbytes} bytes")
        tokens = struct.unpack(f"<{size * len(blocks)}i", content)
        for at, block in enumerate(blocks):
            self._own(service, block)
            own = enumerate(tokens[at * size : (at + 1) * size])
            self.memory[service, block] = {slot: token for slot, token in own if token >= 0}

    def lay_out(self, layout: PoolLayout) -> None:
        """Blocks keep their tokens if they keep their positions."""
        if not keeps_blocks(self.layout, layout):
            self.memory.clear()
            self.owner.clear()
        self.layout = layout

    def close(self) -> None:
        self.closed = True

    def _own(self, service: str, block: int) -> None:
        merged = block // self.layout.services[service].blocks_per_merged
        if self.owner.get(merged) != service:
            for key in [k for k in self.memory if k[0] == self.owner.get(merged) and self._in(k, merged)]:
                del self.memory[key]
            self.owner[merged] = service

    def _in(self, key: tuple[str, int], merged: int) -> bool:
        return key[1] // self.layout.services[key[0]].blocks_per_merged == merged

    def _compute(self, service: str, sequence: _Sequence, count: int) -> None:
        size = self.layout.block_size
        for position in range(sequence.computed, sequence.computed + count):
            token = sequence.tokens[position]
            if token == FAILING_TOKEN:
                raise RuntimeError("the fake device is on fire")
            block = sequence.blocks[position // size]
            self._own(service, block)
            self.memory.setdefault((service, block), {})[position % size] = token
        sequence.computed += count

    def _sample(self, service: str, sequence: _Sequence) -> int:
        size = self.layout.block_size
        known = [
            self.memory[service, sequence.blocks[position // size]][position % size]
            for position in range(sequence.computed)
        ]
        assert known == sequence.tokens, "the pool does not hold what was computed"
        outputs = len(known) - sequence.prompt_tokens
        token = next_token(known, outputs, sequence.sampling, sequence.seed, self.eos_every)
        sequence.tokens.append(token)
        return token


FAKE_WEIGHT_BYTES = 1000
"""Of each service."""
FETCH_S = 0.25
"""Reported duration of a fetch."""


class FakeServices:
    """Adds and removes services of a fake executor; ``loading`` delays them, ``fails`` refuses them."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.loading = threading.Event()
        self.loading.set()
        self.fails = False
        self.weight_bytes = 0

    def load(self, service: Service, folder: Path) -> "FakeModel":
        self.loading.wait(10)
        if self.fails or service.model == "unsupported":
            raise ModelUnsupported(f"{service.model} has layers that would be computed wrongly")
        return FakeModel(LARGE_SHAPE if service.model == "large" else SHAPE)

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        self.executor.lay_out(layout)

    def add(self, service: Service, model: "FakeModel") -> None:
        self.weight_bytes += FAKE_WEIGHT_BYTES

    def remove(self, service: str) -> None:
        self.weight_bytes -= FAKE_WEIGHT_BYTES
        executor = self.executor
        executor.memory = {key: held for key, held in executor.memory.items() if key[0] != service}
        executor.owner = {merged: owner for merged, owner in executor.owner.items() if owner != service}


@dataclass(frozen=True)
class FakeModel:
    kv_shape: KVShape


def make_options(*models: str, blocks: int = 64, **options) -> EngineOptions:
    """Services a, b, ... with a pool of about ``blocks`` blocks of 4 tokens.

    A model is "fake" with knobs: "fake?context=64&eos_every=10&step_ms=2&failing_fetches=3".
    """
    kv = {"memory_bytes": blocks * SHAPE.block_bytes(4), "block_size": 4} | options.pop("kv", {})
    scheduler = SchedulerOptions(**options.pop("scheduler", {}))
    return EngineOptions(
        services=tuple(
            Service(name=name, model=model) for name, model in zip("abcd", models or ("fake",), strict=False)
        ),
        kv_cache=KVCacheOptions(**kv),
        scheduler=scheduler,
        **options,
    )


def build_fake(
    options: EngineOptions, folders: Mapping[str, Path], *, progress=None
) -> tuple[Engine, EngineInfo]:
    """As ``build_engine``, with fake models.

    "unsupported", "crash" and "exit" fail while loading, "slow" takes 2 seconds.
    """
    knobs: dict[str, int] = {"context": 256, "eos_every": 0, "step_ms": 0, "failing_fetches": 0}
    for service in options.services:
        if progress is not None:
            progress(f"loading {service.model}")
        if service.model == "unsupported":
            raise ModelUnsupported("unsupported has layers that would be computed wrongly")
        if service.model == "crash":
            raise RuntimeError("out of luck")
        if service.model == "exit":
            os._exit(3)
        if service.model == "slow":
            time.sleep(2)
        knobs |= {key: int(values[0]) for key, values in parse_qs(urlsplit(service.model).query).items()}
    cache = options.kv_cache
    layout = plan_layout(
        {service.name: SHAPE for service in options.services},
        memory_bytes=cache.memory_bytes or 1 << 20,
        block_size=cache.block_size,
        kind=cache.layout,
    )
    pool = BlockPool(layout, prefix_caching=cache.prefix_caching)
    fresh = ServiceLimits(knobs["context"], (EOS,), weight_bytes=FAKE_WEIGHT_BYTES)
    limits = {s.name: _fake_limits(fresh, s) for s in options.services}
    scheduler = Scheduler(pool, limits, options.scheduler, weights=options.weights)
    executor = FakeExecutor(layout, knobs["eos_every"], knobs["step_ms"] / 1000)
    executor.failing_fetches = knobs["failing_fetches"]
    host = FakeServices(executor)
    host.weight_bytes = FAKE_WEIGHT_BYTES * len(options.services)

    def describe(service: Service) -> ServiceInfo:
        limits = _fake_limits(fresh, service)
        described = describe_service(service.model, scheduler, pool, service.name, limits, VOCAB)
        kv_format = f"{layout.kind} {layout.block_size}"
        return replace(described, kv_format=kv_format, weight_bytes=FAKE_WEIGHT_BYTES)

    changes = ServiceChanges(
        scheduler,
        pool,
        executor,
        host,
        host_pool=None,
        int8=False,
        limits_of=lambda service, model: _fake_limits(fresh, service),
        describe=describe,
    )
    engine = Engine(scheduler, pool, executor, depth=options.scheduler.max_in_flight, changes=changes)
    engine.fake_executor, engine.fake_pool, engine.fake_services = executor, pool, host
    services = {s.name: describe(s) for s in options.services}
    info = EngineInfo(
        services=services,
        device=options.device,
        threads=1,
        block_size=layout.block_size,
        merged_blocks=layout.merged_blocks,
        kv_bytes=layout.total_bytes,
        weight_bytes=host.weight_bytes,
    )
    return engine, info


def _fake_limits(limits: ServiceLimits, service: Service) -> ServiceLimits:
    return replace(limits, pinned=service.pin)


def make_engine(*models: str, **options) -> tuple[Engine, EngineInfo]:
    """An engine with a fake executor in this process."""
    return build_fake(make_options(*models, **options), {})


def make_request(
    id: str = "r", prompt: int | Sequence[int] = 5, service: str = "a", seed: int = 0, **sampling
) -> Request:
    """A greedy request; ``prompt`` is its tokens, or how many."""
    tokens = [97 + (7 * i + len(id)) % 26 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        id=id,
        service=service,
        prompt=tokens,
        sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | sampling)),
        seed=seed,
    )


def run_all(engine: Engine) -> dict[str, list]:
    """Step until the engine is not busy; events by request, with their positions checked."""
    events: dict[str, list] = {}
    while engine.busy:
        for event in engine.step():
            before = events.setdefault(event.request_id, [])
            if before:
                assert event.position == before[-1].position + len(before[-1].tokens)
            before.append(event)
    return events
