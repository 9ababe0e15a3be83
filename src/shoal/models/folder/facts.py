"""ModelFacts from config.json without loading the model: context length, vocabulary, KV shape, end tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models.conversion.run_conversion import ready_tokenizer_folder
from shoal.models.folder.context_length import context_tokens
from shoal.models.folder.json_files import is_size, read_json, size_of, text_config
from shoal.models.tokenizer.end_tokens import end_token_ids

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """KV of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model."""

    architecture: str
    """Class name in config.json."""
    context_tokens: int
    """Length of the longest sequence; see ``context_length``."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerFacts, ...]
    """KV shape of each layer, in order."""
    heads: int
    hidden: int | None
    """Hidden size; None if config.json does not have it."""


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in ``folder``.

    Raises ModelUnavailable if it has no config.json, ModelUnsupported if a size in it is missing (its
    default is only in the model's code) or is not a positive number.
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
            context_tokens=context_tokens(text),
            vocab_size=size_of(text, "vocab_size"),
            eos_token_ids=end_token_ids(folder, ready_tokenizer_folder(folder)),
            layers=(_layer(text),) * size_of(text, *_LAYERS),
            heads=size_of(text, *_HEADS),
            hidden=next((text[name] for name in _HIDDEN if is_size(text.get(name))), None),
        )
    except KeyError as missing:
        raise ModelUnsupported(f"{folder / 'config.json'} does not say {missing.args[0]}") from None


def _layer(config: Mapping[str, Any]) -> LayerFacts:
    heads = size_of(config, *_HEADS)
    if is_size(config.get("kv_lora_rank")):  # latent attention, whose KV is stored expanded
        key_dim = size_of(config, "qk_nope_head_dim") + size_of(config, "qk_rope_head_dim")
        return LayerFacts(heads, key_dim, size_of(config, "v_head_dim"))
    head_dim = config["head_dim"] if is_size(config.get("head_dim")) else size_of(config, *_HIDDEN) // heads
    return LayerFacts(_kv_heads(config, heads), head_dim, head_dim)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    # Falcon and GPTBigCode have a flag for multi-query attention.
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if is_size(config.get(name)):
            return int(config[name])
    return heads
