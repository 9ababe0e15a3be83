"""transformers' ``rope_parameters`` for a GGUF file's model.

Absent keys have llama.cpp's defaults.
"""

import math
from typing import Any

from shoal.core import ModelUnsupported
from shoal.models.gguf.file import INSTEAD, GgufFile

TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors with a factor for each frequency, which become part of the configuration."""

_BASE = 10000.0


def rope_parameters(file: GgufFile, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """The ``rope_parameters`` of a configuration.

    partial: the architecture may rotate a part of each head only. Raises ModelUnsupported if transformers
    has no such encoding.
    """
    rotated = int(file.get("rope.dimension_count", head_dim))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", _BASE))}
    if partial:
        found["partial_rotary_factor"] = _share(rotated, head_dim)
    elif rotated != head_dim:
        file.refuse("rope.dimension_count", f"is not the size of a head ({head_dim}), which is rotated whole")
    yarn = _yarn(file)
    scale = float(file.get("rope.scaling.factor") or file.get("rope.scale_linear") or 1.0)
    original = int(file.get("rope.scaling.original_context_length", file.require("context_length")))
    attention = float(file.get("rope.scaling.attn_factor", 1.0))
    each, long, short = (file.numbers(name, rotated // 2) for name in TENSORS)
    kind = file.get("rope.scaling.type", "linear" if long is None else "longrope")
    if kind == "none":
        kind, scale = "linear", 1.0
    if long is not None and short is not None and each is None and scale == 1:
        return found | _by_factors(long, short, original, attention)
    if kind == "yarn" and each is None:
        return found | yarn | {"factor": scale, "original_max_position_embeddings": original}
    if kind != "linear" or long is not None or short is not None or attention != 1:
        raise ModelUnsupported(
            f"its rope.scaling.type {kind} with a factor of {scale}, an attn_factor of {attention} and the"
            f" tensors {', '.join(filter(file.has, TENSORS)) or 'of no factors'} is unknown here; {INSTEAD}"
        )
    if each is not None:
        each = [factor * scale for factor in each]
        return found | _by_factors(each, each, int(file.require("context_length")), 1.0)
    return found | ({"rope_type": "linear", "factor": scale} if scale != 1 else {})


def _yarn(file: GgufFile) -> dict[str, Any]:
    """Parameters of YaRN; the keys are always read, since they have no effect without YaRN."""
    found: dict[str, Any] = {"rope_type": "yarn"}
    for name in ("beta_fast", "beta_slow"):
        value = file.get(f"rope.scaling.yarn_{name}")
        if value is not None:
            found[name] = float(value)
    if file.get("rope.scaling.yarn_ext_factor", 1.0) not in (1, -1):
        file.refuse("rope.scaling.yarn_ext_factor", "is not that of YaRN (1)")
    scale, attention = file.get("rope.scaling.factor"), file.get("rope.scaling.attn_factor", 1.0)
    own = file.get("rope.scaling.yarn_attn_factor")
    if own is not None:
        found["attention_factor"] = float(own) * attention
    elif scale and attention != 1:
        found["attention_factor"] = (0.1 * math.log(max(scale, 1.0)) + 1.0) * attention
    return found


def _by_factors(long: list[float], short: list[float], original: int, attention: float) -> dict[str, Any]:
    """Longrope with a factor for each frequency. With the same factors for long and short contexts it is
    exact for any formula of factors, such as Llama 3's."""
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "factor": 1.0,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _share(rotated: int, head_dim: int) -> float:
    """The rotated share of a head, such that its product with ``head_dim`` is not rounded down."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)
