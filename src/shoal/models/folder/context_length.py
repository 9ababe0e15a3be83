"""Context length of a model, from its configuration and its scaling of rotary embeddings."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.models.folder.json_files import is_size, size_of

_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_ORIGINAL = "original_max_position_embeddings"
_BY_LENGTH = ("dynamic", "longrope", "su")


def context_tokens(config: Mapping[str, Any]) -> int:
    """Length of the longest sequence, as in vLLM, for which one encoding of positions is correct.

    YaRN and linear scaling extend the trained length by their factor, and never shorten the stated length.
    Llama 3's and Gemma 3's scaling is already included in it. Dynamic and longrope scaling change all
    positions with the length of the sequence, and a batch has sequences of many lengths, so the length
    before scaling counts. Raises KeyError if the configuration has no length.
    """
    longest = size_of(config, *_CONTEXT)
    return min((_scaled(config, rope, longest) for rope in _rope_parameters(config)), default=longest)


def _rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rope parameters of all layers, or of each kind of layer that limits the length; layers with a window
    only attend short distances. If both names are present, transformers uses the first."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    nested = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    for name, part in (nested or {"": rope}).items():
        if name != "sliding_attention" or _kind(part) in _BY_LENGTH:
            yield part


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _scaled(config: Mapping[str, Any], rope: Mapping[str, Any], longest: int) -> int:
    kind = _kind(rope)
    original = next((part[_ORIGINAL] for part in (config, rope) if is_size(part.get(_ORIGINAL))), longest)
    if kind in _BY_LENGTH:
        same = "short_factor" in rope and rope["short_factor"] == rope.get("long_factor")
        return longest if same else min(longest, original)
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        return longest
    if str(config.get("model_type")).startswith("gemma3"):
        return longest
    if kind == "yarn":
        return max(longest, int(original * factor))
    return int(longest * factor) if kind == "linear" else longest
