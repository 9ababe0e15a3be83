"""Tiny random models, and plans made by hand for the executor."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from at_hand import DEVICE, on_cpu, on_gpu
from shoal.core import NewSequence, SamplingParams, Service, StepPlan
from shoal.execute.executors import make_executor
from shoal.execute.model.model_set import ModelSet, ServedModel, load_models
from shoal.kvcache import BlockPool, plan_layout
from shoal.native import load_native

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
VOCAB = 199
COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(kind: str) -> PretrainedConfig:
    """A model of ``kind`` so small that it is made in milliseconds, with a shape of its own."""
    decoder = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "max_position_embeddings": 256,
    }
    if kind == "llama":
        return LlamaConfig(**COMMON, **decoder, num_attention_heads=6, num_key_value_heads=2)
    if kind == "qwen2":
        return Qwen2Config(**COMMON, **decoder, num_attention_heads=4, num_key_value_heads=2)
    if kind == "qwen3":
        return Qwen3Config(**COMMON, **decoder, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    if kind == "mistral":
        return MistralConfig(
            **COMMON, **decoder, num_attention_heads=4, num_key_value_heads=2, sliding_window=11
        )
    if kind == "gemma2":
        return Gemma2Config(
            **COMMON, **decoder, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            sliding_window=9, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
        )  # fmt: skip
    if kind == "gemma3":
        return Gemma3TextConfig(
            **COMMON, **decoder, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
            sliding_window=8, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )  # fmt: skip
    if kind == "gpt2":
        return GPT2Config(**COMMON, n_embd=48, n_head=4, n_layer=3, n_positions=256)
    if kind == "opt":
        return OPTConfig(
            **COMMON, hidden_size=48, word_embed_proj_dim=48, ffn_dim=96, num_hidden_layers=2,
            num_attention_heads=3, max_position_embeddings=256,
        )  # fmt: skip
    if kind == "mixtral":
        return MixtralConfig(
            **COMMON, **decoder, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3,
            num_experts_per_tok=2,
        )  # fmt: skip
    raise ValueError(kind)


needs_native = pytest.mark.skipif(load_native() is None, reason="the native library was not built, or is off")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton's kernels need a CUDA device (SHOAL_TEST_DEVICE), or TRITON_INTERPRET=1",
)
BACKENDS = (
    "reference",
    "batched",
    pytest.param("native", marks=[needs_native, on_cpu]),
    pytest.param("triton", marks=[needs_triton, on_gpu]),
)
"""Attention backends that a user may choose, to parametrise a test with."""

KINDS = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "gpt2", "opt")
FUSED_KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
"""Those whose decoder layers are built like Llama's."""
_SAVED: dict[tuple[str, torch.dtype, int], dict[str, bytes]] = {}
"""Files of the models that were made: many tests make the same."""


def make_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Save a random model of ``config``; its weights are large enough that attention matters."""
    torch.manual_seed(seed)
    key = (config.to_json_string(use_diff=False), dtype, seed)
    if key not in _SAVED:
        _SAVED[key] = _save(config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _SAVED[key].items():
        (folder / name).write_bytes(content)
    return folder


def _save(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, bytes]:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    with TemporaryDirectory() as folder:
        model.to(dtype).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def reference_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What `transformers` generates greedily, alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """A deterministic prompt without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


class HandScheduler:
    """A minimal source of plans: prompts in fixed chunks, then decoding together."""

    def __init__(
        self,
        folders: dict[str, Path],
        *,
        attention: str = "auto",
        layout: str = "merged",
        block_size: int = 4,
        memory_bytes: int = 4 << 20,
        dtype: str = "float32",
        depth: int = 1,
        weights_bytes: int | None = None,
        **service: Any,
    ) -> None:
        services = [
            Service(name=name, model=str(folder), dtype=dtype, **service) for name, folder in folders.items()
        ]
        self.models: ModelSet = load_models(
            services, folders, device=DEVICE, attention=attention, weights_bytes=weights_bytes
        )
        self.layout = plan_layout(
            self.models.kv_shapes, memory_bytes=memory_bytes, block_size=block_size, kind=layout
        )
        self.pool = BlockPool(self.layout)
        unit_ids = self.pool.unit_ids if layout == "split" else None
        self.executor = make_executor(self.models, self.layout, depth=depth, unit_ids=unit_ids)
        self.numbers = 0

    def poison(self) -> None:
        """Fill the whole pool with bits that read as NaN in every dtype."""
        self.executor.store.buffer.fill_(0xFF)

    def blocks(self, service: str, tokens: int) -> tuple[int, ...]:
        blocks = self.pool.allocate(service, -(-tokens // self.pool.block_size))
        assert blocks is not None
        return tuple(blocks)

    def generate(
        self,
        service: str,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        chunk: int = 1000,
        sampling: Sequence[SamplingParams] | SamplingParams = GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """``count`` tokens for each prompt; prefill in chunks, prompts of all lengths in one batch."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        tables = [self.blocks(service, len(p) + count) for p in prompts]
        numbers = [self.numbers + i for i in range(len(prompts))]
        self.numbers += len(prompts)
        joined = tuple(
            NewSequence(number, list(prompt), len(prompt), 0, table, p, (seeds or numbers)[i])
            for i, (number, prompt, table, p) in enumerate(zip(numbers, prompts, tables, params, strict=True))
        )
        computed = [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        while any(len(out) < count for out in outputs):
            rows = [i for i, out in enumerate(outputs) if len(out) < count]
            known = [len(prompts[i]) + len(outputs[i]) for i in rows]
            new = [min(chunk, k - computed[i]) for i, k in zip(rows, known, strict=True)]
            sampled = [at for at, i in enumerate(rows) if computed[i] + new[at] == known[at]]
            plan = StepPlan(
                number=0,
                service=service,
                seq_ids=tuple(numbers[i] for i in rows),
                new_tokens=tuple(new),
                sampled=tuple(sampled),
                joined=joined,
            )
            joined = ()
            self.executor.submit(plan)
            result = self.executor.collect()
            for at, i in enumerate(rows):
                computed[i] += new[at]
            for at, token in zip(sampled, result.tokens[0], strict=True):
                outputs[rows[at]].append(token)
        for table in tables:
            self.pool.free(service, table)
        return outputs


def with_forward(served: ServedModel, forward: Any) -> ServedModel:
    """The same with another Forward."""
    return replace(served, model=replace(served.model, forward=forward))


def logits_of(
    scheduler: HandScheduler, kind: str, prompts: Sequence[Sequence[int]], count: int, chunk: int = 1000
) -> set[bytes]:
    """The bits of every row of logits that come up while the prompts are continued by ``count`` tokens."""
    rows: set[bytes] = set()
    services = scheduler.models.services
    plain = services[kind]

    def forward(*arguments: Any) -> torch.Tensor:
        logits = plain.model.forward(*arguments)
        rows.update(row.float().numpy().tobytes() for row in logits)
        return logits

    services[kind] = with_forward(plain, forward)
    scheduler.generate(kind, prompts, count, chunk=chunk)
    services[kind] = plain
    return rows
