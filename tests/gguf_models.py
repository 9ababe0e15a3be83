"""GGUF files of models of transformers, with keys and tensors as llama.cpp's converter writes them."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from gguf_files import TOKENS, add_tokenizer

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "minimax_m2": "minimax-m2",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Names of model types that are others in GGUF files."""
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def write_gguf_model(
    model: Any,
    file: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    lacks: tuple[str, ...] = (),
    tensors: Mapping[str, int] | None = None,
) -> None:
    """Write ``model`` in float32 with a tokenizer of bytes.

    keys: further ones of the architecture, or other values. lacks: keys that are left out. tensors: further
    ones, of so many ones.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, name)
    values = {**_sizes(config), **_positions(config), **_further(config), **(keys or {})}
    for key, value in values.items():
        if key not in lacks:
            _add(writer, f"{name}.{key}", value)
    add_tokenizer(writer, TOKENS)
    for tensor, weight in (*_tensors(model, name), *_factors(config)):
        writer.add_tensor(tensor, np.ascontiguousarray(weight.float().numpy()))
    for tensor, count in (tensors or {}).items():
        writer.add_tensor(tensor, np.ones(count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _sizes(config: Any) -> dict[str, Any]:
    inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
    }
    if hasattr(config, "num_key_value_heads"):
        found["attention.head_count_kv"] = config.num_key_value_heads
    if getattr(config, "head_dim", None) is not None:
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, name):
            kind = "layer_norm_rms_epsilon" if name == "rms_norm_eps" else "layer_norm_epsilon"
            found[f"attention.{kind}"] = getattr(config, name)
    return found


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    """Of all layers, or of those that attend to everything."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _positions(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    if not rope:
        return {}
    found: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if config.model_type == "stablelm":
        found = {}  # its converter writes none
    share = rope.get("partial_rotary_factor")
    if share is not None or config.model_type in ("llama", "mistral"):
        found["rope.dimension_count"] = int(head_dim_of(config) * (share or 1.0))
    kind, scaling = rope["rope_type"], "rope.scaling"
    if kind in ("linear", "yarn"):
        found |= {f"{scaling}.type": kind, f"{scaling}.factor": float(rope["factor"])}
    if kind == "yarn":
        found[f"{scaling}.original_context_length"] = rope["original_max_position_embeddings"]
        for name, key in (("attention_factor", "attn_factor"), ("beta_fast",) * 2, ("beta_slow",) * 2):
            if rope.get(name) is not None:
                found[f"{scaling}.yarn_{key}"] = float(rope[name])
    if config.model_type == "phi3":
        original = config.original_max_position_embeddings
        found[f"{scaling}.original_context_length"] = original
        if kind == "longrope":
            scale = config.max_position_embeddings / original
            found[f"{scaling}.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


def _further(config: Any) -> dict[str, Any]:
    kind = config.model_type
    found: dict[str, Any] = {}
    if kind == "gemma2":
        found |= {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if kind in ("gemma2", "gemma3_text"):
        found["attention.sliding_window"] = config.sliding_window
    if kind == "phi3":
        found["attention.sliding_window"] = config.sliding_window or 0
    if kind == "stablelm":
        found["use_parallel_residual"] = True
    if hasattr(config, "num_experts_per_tok"):
        found |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    if kind in ("qwen2_moe", "qwen3_moe"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind == "qwen2_moe":
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if kind == "minimax_m2":
        found |= {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
    return found


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    config = model.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, changed in _parts(name, weight, config):
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            yield stored, changed


def _parts(name: str, weight: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """One or more tensors of a parameter, by names that the converter knows."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}.weight"), half
        return
    if name.endswith("experts.down_proj"):
        name += ".weight"
    if name.endswith("e_score_correction_bias"):
        name = name.replace("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction.bias")
    if config.model_type in ("llama", "mistral"):
        if ".q_proj." in name:
            weight = interleaved(weight, config.num_attention_heads)
        if ".k_proj." in name:
            weight = interleaved(weight, config.num_key_value_heads)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight.float() + 1
    if config.model_type == "gpt2" and name.endswith(_TRANSPOSED):
        weight = weight.T
    if name.endswith("shared_expert_gate.weight"):
        weight = weight.squeeze(0)
    yield name, weight


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head with those of its second half between those of its first."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _factors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.tensor(list(_llama3_factors(rope, head_dim_of(config))))


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Iterator[float]:
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            yield 1.0
        elif wavelength > original / low:
            yield float(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            yield 1 / ((1 - smooth) / factor + smooth)
