"""What a config.json says about a model that others need without loading it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models.folder_config import eos_from_configs, read_json, text_config

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer stores per token."""

    kv_heads: int
    """Heads whose keys and values are stored."""
    key_dim: int
    """Elements of one key."""
    value_dim: int
    """Elements of one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model."""

    architecture: str
    """Class name in config.json."""
    context_tokens: int
    """Length of the longest sequence; with dynamic or longrope scaling the length before scaling."""
    vocab_size: int
    """Entries of the vocabulary."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end the output."""
    layers: tuple[LayerFacts, ...]
    """KV shape of each layer, in order."""


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in ``folder``.

    Raises ModelUnavailable where it has no config.json, ModelUnsupported where a size in it is missing
    (then only the model's code knows the default) or is not a positive number.
    """
    config = read_json(folder / "config.json")
    if not config:
        raise ModelUnavailable(f"{folder} has no config.json, so it is no model folder")
    text = text_config(config)
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else config.get("model_type", "unknown")
    try:
        return ModelFacts(
            architecture=str(architecture),
            context_tokens=_context_tokens(text),
            vocab_size=_size(text, "vocab_size"),
            eos_token_ids=eos_from_configs(folder),
            layers=(_layer(text),) * _size(text, *_LAYERS),
        )
    except KeyError as missing:
        raise ModelUnsupported(f"{folder / 'config.json'} does not say {missing.args[0]}") from None


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if _is_size(config.get(name)):
            return int(config[name])
    raise KeyError(" or ".join(names))


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _layer(config: Mapping[str, Any]) -> LayerFacts:
    heads = _size(config, *_HEADS)
    if _is_size(config.get("kv_lora_rank")):  # latent attention, stored expanded
        key_dim = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
        return LayerFacts(heads, key_dim, _size(config, "v_head_dim"))
    head_dim = config["head_dim"] if _is_size(config.get("head_dim")) else _size(config, *_HIDDEN) // heads
    return LayerFacts(_kv_heads(config, heads), head_dim, head_dim)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    # Falcon and GPTBigCode say with a flag that all query heads share one KV head.
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if _is_size(config.get(name)):
            return int(config[name])
    return heads


def _context_tokens(config: Mapping[str, Any]) -> int:
    longest = _size(config, *_CONTEXT)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return longest
    if rope.get("rope_type", rope.get("type")) not in ("dynamic", "longrope", "su"):
        return longest
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return min(longest, original) if _is_size(original) else longest
