"""transformers' config for a GGUF file's model, from all keys that affect what is computed, by architecture.

Properties that are not in the file, such as activations, are fixed by the architecture, in llama.cpp as well
as in transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shoal.core import ModelUnsupported
from shoal.models.gguf.file import INSTEAD, GgufFile
from shoal.models.gguf.rope import rope_parameters

_RMS, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_LOCAL_BASE = 10000.0
_GEMMA_SCALAR = 256
_SOFTMAX, _SIGMOID = 1, 2


def transformers_config(file: GgufFile) -> dict[str, Any]:
    """The values of a config.json, including ``model_type``.

    Raises ModelUnsupported for an unknown architecture or key.
    """
    build = ARCHITECTURES.get(file.architecture)
    if build is None:
        raise ModelUnsupported(
            f"its architecture {file.architecture!r:.40} is not read here, those that are:"
            f" {', '.join(sorted(ARCHITECTURES))}; {INSTEAD}"
        )
    found = (file.token(name) for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(token for token in found if token is not None))
    values = build(file) | {
        "vocab_size": file.shape("token_embd.weight")[0],
        "tie_word_embeddings": not file.has("output.weight"),
        "bos_token_id": file.token("bos"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": file.token("padding"),
    }
    file.refuse_unread()
    return values


def _sizes(file: GgufFile) -> dict[str, Any]:
    heads = file.require("attention.head_count")
    return {
        "max_position_embeddings": file.require("context_length"),
        "hidden_size": file.require("embedding_length"),
        "num_hidden_layers": file.require("block_count"),
        "intermediate_size": file.require("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
    }


def _head_dim(file: GgufFile, *, free: bool = True) -> int:
    """Head size; free: the architecture allows it to differ from hidden size / heads."""
    shared = int(file.require("embedding_length")) // int(file.require("attention.head_count"))
    found = int(file.get("attention.key_length", shared))
    if file.get("attention.value_length", found) != found:
        file.refuse("attention.value_length", f"is not the size of keys ({found})")
    if not free and found != shared:
        file.refuse("attention.key_length", f"is not the size of a head ({shared})")
    return found


def _decoder(file: GgufFile, *, free: bool = True, partial: bool = False, eps: str = _RMS) -> dict[str, Any]:
    """Values that most architectures have; free, partial: see ``_head_dim`` and ``rope_parameters``."""
    head_dim = _head_dim(file, free=free)
    found = _sizes(file) | {"rope_parameters": rope_parameters(file, head_dim, partial=partial)}
    if eps == _RMS:
        found["rms_norm_eps"] = file.require(_RMS)
    return found | ({"head_dim": head_dim} if free else {})


def _llama(file: GgufFile) -> dict[str, Any]:
    found, window = _decoder(file), _window_of_all(file)
    biases = {"attention_bias": file.has("blk.0.attn_q.bias"), "mlp_bias": file.has("blk.0.ffn_up.bias")}
    if window is None:
        return found | {"model_type": "llama"} | biases
    if any(biases.values()):
        file.refuse(_WINDOW, "is not read here for layers with biases")
    return found | {"model_type": "mistral", "sliding_window": window}


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return _decoder(file) | {"model_type": "qwen2"} | _window_of_some(file)


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return _qwen2(file) | {"model_type": "qwen3", "attention_bias": file.has("blk.0.attn_q.bias")}


def _qwen2moe(file: GgufFile) -> dict[str, Any]:
    inner = file.require("feed_forward_length")
    shared = file.get("expert_shared_feed_forward_length", inner)
    more = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared}
    return _decoder(file) | _qwen_experts(file, normed=False) | more | _window_of_some(file)


def _qwen3moe(file: GgufFile) -> dict[str, Any]:
    more = {"model_type": "qwen3_moe", "attention_bias": file.has("blk.0.attn_q.bias")}
    return _decoder(file) | _qwen_experts(file, normed=True) | more | _window_of_some(file)


def _qwen_experts(file: GgufFile, *, normed: bool) -> dict[str, Any]:
    """normed: whether the weights of a token's experts are divided by their sum, if no key says so."""
    used = file.require("expert_used_count")
    _gate(file, _SOFTMAX)
    inner = file.require("feed_forward_length")
    return {
        "num_experts": file.require("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": file.get("expert_feed_forward_length", inner // used),
        "norm_topk_prob": bool(file.get("expert_weights_norm", normed)),
    }


def _gate(file: GgufFile, function: int) -> None:
    if file.get("expert_gating_func", function) != function:
        file.refuse("expert_gating_func", f"is not that of the architecture ({function})")


def _minimax(file: GgufFile) -> dict[str, Any]:
    _gate(file, _SIGMOID)
    found = _decoder(file, partial=True) | {
        "model_type": "minimax_m2",
        "num_local_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
    }
    return found | {"intermediate_size": file.get("expert_feed_forward_length", found["intermediate_size"])}


def _phi3(file: GgufFile) -> dict[str, Any]:
    found = _decoder(file, free=False, partial=True)
    rope = found["rope_parameters"]
    if rope["rope_type"] not in ("default", "longrope"):
        file.refuse("rope.scaling.type", "is none that Phi-3 has in transformers")
    original = rope.get("original_max_position_embeddings", found["max_position_embeddings"])
    more = {"original_max_position_embeddings": original, "sliding_window": _window_of_all(file)}
    return found | {"model_type": "phi3"} | more


def _stablelm(file: GgufFile) -> dict[str, Any]:
    return _decoder(file, free=False, partial=True, eps=_LAYER_NORM) | {
        "model_type": "stablelm",
        "layer_norm_eps": file.require(_LAYER_NORM),
        "use_qkv_bias": file.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not file.has("blk.0.ffn_norm.weight"),
    }


def _starcoder2(file: GgufFile) -> dict[str, Any]:
    return _decoder(file, free=False, eps=_LAYER_NORM) | {
        "model_type": "starcoder2",
        "norm_epsilon": file.require(_LAYER_NORM),
        "use_bias": file.has("blk.0.attn_q.bias"),
        "sliding_window": _window_of_all(file),
    }


def _gpt2(file: GgufFile) -> dict[str, Any]:
    sizes = _sizes(file)
    _head_dim(file, free=False)
    if sizes["num_key_value_heads"] != sizes["num_attention_heads"]:
        file.refuse("attention.head_count_kv", "is not the number of heads")
    return {
        "model_type": "gpt2",
        "n_positions": sizes["max_position_embeddings"],
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_inner": sizes["intermediate_size"],
        "n_head": sizes["num_attention_heads"],
        "layer_norm_epsilon": file.require(_LAYER_NORM),
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return _decoder(file) | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _gemma_scalar(file, largest=46),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0) or None,
        **_windows(file, period=2),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    found = _decoder(file)
    local = float(file.get("rope.freq_base_swa", _LOCAL_BASE))
    return found | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _gemma_scalar(file, largest=62),
        "attn_logit_softcapping": file.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": file.get("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        **_windows(file, period=6),
    }


def _gemma_scalar(file: GgufFile, *, largest: int) -> int:
    """Attention scores are divided by its square root. It is not in GGUF files: 256 in all published sizes
    except 27B, which has ``largest`` layers and uses hidden size / heads."""
    if file.require("block_count") == largest:
        return int(file.require("embedding_length")) // int(file.require("attention.head_count"))
    return _GEMMA_SCALAR


def _window_of_all(file: GgufFile) -> int | None:
    """The sliding window of an architecture in which all layers or none have it."""
    windows = _windows(file, period=0)
    kinds = set(windows["layer_types"])
    if len(kinds) > 1:
        file.refuse(_PATTERN, "is not of all layers")
    return windows["sliding_window"] if kinds == {"sliding_attention"} else None


def _window_of_some(file: GgufFile) -> dict[str, Any]:
    """The sliding windows of an architecture without a fixed pattern of layers."""
    if file.get(_WINDOW, 0) and file.listed(_PATTERN) is None:
        file.refuse(_WINDOW, f"is of layers that no {_PATTERN} names")
    windows = _windows(file, period=0)
    return windows | {"use_sliding_window": "sliding_attention" in windows["layer_types"]}


def _windows(file: GgufFile, *, period: int) -> dict[str, Any]:
    """The sliding window and the kind of each layer.

    period: every period-th layer has full attention, if no key says otherwise; 0 for no such layers.
    """
    layers = int(file.require("block_count"))
    window, pattern = file.get(_WINDOW, 0), file.listed(_PATTERN)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            file.refuse(_PATTERN, f"is not of {layers} layers")
        slides = [bool(flag) for flag in pattern]
    else:
        period = period if pattern is None else int(pattern)
        slides = [period == 0 or (i + 1) % period != 0 for i in range(layers)]
    kinds = ["sliding_attention" if window and flag else "full_attention" for flag in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


ARCHITECTURES: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "minimax-m2": _minimax,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""Builders of configs by architecture name in GGUF files."""
