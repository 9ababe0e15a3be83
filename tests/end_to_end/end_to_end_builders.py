"""Real engines in this process, driven by token ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shoal.core import FinishReason, Request, SamplingParams, Service, TokenLogprobs
from shoal.engine import EngineOptions, build_engine
from shoal.kvcache import BlockPool, KVCacheOptions
from shoal.schedule import Conservative, SchedulerOptions


@dataclass
class Outcome:
    """What an engine answered: output tokens, newest logprobs and ends by request
    id, and what it counted meanwhile."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    cached_tokens: int = 0


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
    memory_bytes: int = 32 << 20,
    block_size: int = 16,
    layout: str = "merged",
    prefix_caching: bool = True,
    attention: str = "auto",
    dtype: str = "float32",
    **scheduler: object,
) -> Outcome:
    """Answer ``rounds`` of requests, one round after the other, checking the pool's books all along."""
    options = EngineOptions(
        services=tuple(
            Service(name=name, model=str(folder), dtype=dtype) for name, folder in folders.items()
        ),
        kv_cache=KVCacheOptions(
            memory_bytes=memory_bytes, block_size=block_size, layout=layout, prefix_caching=prefix_caching
        ),
        scheduler=SchedulerOptions(**scheduler),  # type: ignore[arg-type]
        attention=attention,
    )
    engine, _ = build_engine(options, folders, in_process=True)
    pool: BlockPool = engine._pool
    outcome = Outcome()
    for requests in rounds:
        for request in requests:
            engine.submit(request)
            outcome.tokens[request.id] = []
        while engine.busy:
            for event in engine.step():
                outcome.tokens[event.request_id] += event.tokens
                if event.logprobs is not None:
                    outcome.logprobs[event.request_id] = event.logprobs
                if event.finish is not None:
                    assert event.finish in (FinishReason.LENGTH, FinishReason.STOP)
                    outcome.ends[event.request_id] += 1
            pool.check_integrity()
    assert set(outcome.ends.values()) == {1}
    assert all(pool.live_blocks(name) == 0 for name in folders)
    stats = engine.stats()
    outcome.evictions = sum(service.evictions for service in stats.services.values())
    outcome.cached_tokens = sum(service.cached_tokens for service in stats.services.values())
    engine.close()
    return outcome


OVERCOMMIT = {"admission": Conservative(overcommit=20.0)}
"""Admits far more than fits, so that a small pool must evict."""


@cache
def _reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy_reference(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What `transformers` generates for ``prompt`` alone, in float32."""
    model = _reference(folder)
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()
