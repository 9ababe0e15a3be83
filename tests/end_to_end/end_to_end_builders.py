"""Real engines in this process, driven by token ids."""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from references import reference_model

from at_hand import DEVICE
from shoal.config import PRESETS
from shoal.core import (
    FinishReason,
    Request,
    ResumeState,
    SamplingParams,
    Service,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from shoal.engine import Engine, EngineOptions, assemble_engine
from shoal.execute.model.loading import LoadedModel, ModelLoader
from shoal.execute.model.model_set import ModelSet
from shoal.execute.protocol import Executor, Interrupted, never
from shoal.frontend.offline_batch import OfflineBatch, RequestOutput
from shoal.kvcache import BlockPool, KVCacheOptions
from shoal.schedule import Conservative


@dataclass
class Outcome:
    """What an engine answered: output tokens, newest logprobs, all of the prompt's, embeddings and ends by
    request id, and what it counted meanwhile."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    embeddings: dict[str, list[bytes]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    compacted_blocks: int = 0
    cached_tokens: int = 0
    slices: int = 0
    """Slices that ended before their requests."""
    failed_steps: dict[str, int] = field(default_factory=dict)


class Paced:
    """An executor of which every step takes as long, and the clock that it drives: so runs repeat exactly."""

    def __init__(self, executor: Executor, step_ns: int) -> None:
        self._executor = executor
        self._step_ns = step_ns
        self.now_ns = 0

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        self._executor.submit(plan, interrupted)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        durations_ns = [self._step_ns] * len(result.durations_ns)
        self.now_ns += sum(durations_ns)
        return dataclasses.replace(result, durations_ns=durations_ns)

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        return self._executor.ready(seq_ids)

    def close(self) -> None:
        self._executor.close()


def make_request(
    name: str, service: str, prompt: Sequence[int], count: int, seed: int = 0, **params: object
) -> Request:
    sampling = SamplingParams(
        **{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **params}  # type: ignore[arg-type]
    )
    return Request(id=name, service=service, prompt=list(prompt), sampling=sampling, seed=seed)


def run_engine(
    folders: Mapping[str, Path],
    rounds: Sequence[Sequence[Request]],
    *,
    preset: str = "shoal",
    memory_bytes: int = 4 << 20,
    swap_bytes: int | None = None,
    block_size: int = 16,
    layout: str | None = None,
    prefix_caching: bool = True,
    attention: str = "auto",
    dtype: str | Mapping[str, str] = "float32",
    kv_dtype: str = "auto",
    weights: str = "files",
    execution_s: Mapping[str, float] | None = None,
    step_s: float = 0.01,
    every: int = 0,
    after: Mapping[str, int] | None = None,
    threads: int = 1,
    prepare: Callable[[Executor], None] = lambda executor: None,
    on_end: Callable[[str], None] = lambda request_id: None,
    **scheduler: object,
) -> Outcome:
    """Answer ``rounds`` of requests, one round after the other, checking the pool's books all along.

    preset: whose scheduler and layout are taken, except for what is given here. every: steps between two
    requests of a round (0: all come at once). after: how many steps after the begin of its round a request
    of some id comes. A step takes ``step_s`` on the engine's clock. threads: one, as models this small take
    longer with more. prepare: is told of the executor,
    on_end of each request that has ended.
    """
    chosen = PRESETS[preset]
    options = EngineOptions(
        services=tuple(
            Service(
                name=name,
                model=str(folder),
                dtype=dtype if isinstance(dtype, str) else dtype[name],
                execution_s=(execution_s or {}).get(name),
                weights=weights,
            )
            for name, folder in folders.items()
        ),
        kv_cache=KVCacheOptions(
            memory_bytes=memory_bytes,
            block_size=block_size,
            dtype=kv_dtype,
            layout=chosen.layout if layout is None else layout,
            prefix_caching=prefix_caching,
            swap_bytes=swap_bytes,
        ),
        scheduler=dataclasses.replace(chosen.scheduler, **scheduler),  # type: ignore[arg-type]
        device=DEVICE,
        attention=attention,
        threads=threads,
    )
    paced: list[Paced] = []

    def pace(executor: Executor) -> Executor:
        prepare(executor)
        paced.append(Paced(executor, round(step_s * 1e9)))
        return paced[0]

    engine, _ = assemble_engine(options, _load(options, folders), threads=threads, wrap=pace)
    engine._clock = lambda: paced[0].now_ns
    outcome = Outcome()
    for requests in rounds:
        due = [(every * i + (after or {}).get(one.id, 0), one) for i, one in enumerate(requests)]
        _answer(engine, due, outcome, on_end)
    assert set(outcome.ends.values()) == {1}
    _check_books(engine)
    for pool in _pools(engine):
        assert all(pool.live_blocks(name) == 0 for name in folders)
    for name, service in engine.stats().services.items():
        outcome.failed_steps[name] = service.failed_steps
        outcome.preemptions += service.preemptions
        outcome.recomputed_tokens += service.recomputed_tokens
        outcome.swapped_tokens += service.swapped_tokens
        outcome.compacted_blocks += service.compacted_blocks
        outcome.cached_tokens += service.cached_tokens
    engine.close()
    return outcome


_LOADER = ModelLoader(torch.device(DEVICE))
_RECENT: deque[LoadedModel] = deque(maxlen=4)
"""Kept for runs to come: those of bundled models take seconds to load."""


def run_batch(engine: Engine, batch: OfflineBatch) -> list[RequestOutput]:
    """The outputs of a batch that has the engine to itself."""
    batch.submit()
    while batch.unfinished or engine.busy:
        for event in engine.step():
            batch.add_event(event)
    return batch.outputs()


def _load(options: EngineOptions, folders: Mapping[str, Path]) -> ModelSet:
    assert options.threads is not None
    torch.set_num_threads(options.threads)
    models = ModelSet(_LOADER, options.attention)
    for service in options.services:
        _RECENT.append(_LOADER.load(service, folders[service.name]))
        models.add(service, _RECENT[-1])
    return models


def _answer(
    engine: Engine, due: Sequence[tuple[int, Request]], outcome: Outcome, on_end: Callable[[str], None]
) -> None:
    coming = sorted(due, key=lambda pair: pair[0])
    steps = 0
    sliced: dict[str, Request] = {}
    while coming or engine.busy:
        while coming and coming[0][0] <= steps:
            request = coming.pop(0)[1]
            engine.submit(request)
            sliced[request.id] = request
            outcome.tokens[request.id] = []
        if engine.idle and engine.needs_polling:
            time.sleep(0.0005)  # for those that it waits for
        for event in engine.step():
            outcome.tokens[event.request_id] += event.tokens
            if event.logprobs is not None:
                outcome.logprobs[event.request_id] = event.logprobs
            if event.prompt_logprobs is not None:
                told = outcome.prompt_logprobs.get(event.request_id, ())
                outcome.prompt_logprobs[event.request_id] = told + event.prompt_logprobs
            if event.embedding is not None:
                outcome.embeddings.setdefault(event.request_id, []).append(event.embedding)
            if event.finish is FinishReason.SLICE:
                again = _next_slice(sliced[event.request_id], outcome.tokens[event.request_id])
                sliced[again.id] = again
                engine.submit(again)
                outcome.slices += 1
            elif event.finish is not None:
                if event.error is not None:
                    outcome.errors[event.request_id] = event.error
                else:
                    assert event.finish in (FinishReason.LENGTH, FinishReason.STOP)
                outcome.ends[event.request_id] += 1
                on_end(event.request_id)
        steps += 1
        _check_books(engine)


def _next_slice(request: Request, output: Sequence[int]) -> Request:
    """The request after a slice, in a batch behind all others."""
    most, batch = request.sampling.max_tokens, request.batch
    assert most is not None
    assert batch is not None
    resumed = ResumeState(max_new_tokens=most, num_admissions=1)
    return dataclasses.replace(request, output_tokens=tuple(output), resume_state=resumed, batch=batch + 1000)


def _check_books(engine: Engine) -> None:
    tables = None
    if not engine._in_flight:
        services = engine._scheduler._services
        tables = {
            name: [request.block_ids for request in state.running.requests]
            for name, state in services.items()
        }
    engine._pool.check_integrity(tables)
    for pool in _pools(engine)[1:]:
        pool.check_integrity()


def _pools(engine: Engine) -> list[BlockPool]:
    host = engine._scheduler._store._host
    return [engine._pool] if host is None else [engine._pool, host]


OVERCOMMIT = {"admission": Conservative(overcommit=20.0)}
"""Admits far more than fits, so that a small pool must preempt."""


@cache
def _reference_tokens(folder: Path, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    model = reference_model(folder)
    longest = max(map(len, prompts))
    ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[:, longest:].tolist()


def greedy_reference(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What `transformers` generates for ``prompt`` alone, in float32."""
    return greedy_references(folder, [prompt], count)[0]


def greedy_references(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What it generates for several prompts, read as one batch; they should be of similar length."""
    return _reference_tokens(folder, tuple(map(tuple, prompts)), count)
