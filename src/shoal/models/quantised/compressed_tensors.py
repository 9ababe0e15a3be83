"""The quantization_config of compressed-tensors (llm-compressor), and of FP8 folders (DeepSeek, Qwen)."""

from collections.abc import Mapping
from typing import Any

import regex

from shoal.models.quantised.scheme import (
    ALL,
    WHOLE,
    Quantisation,
    Rule,
    Scheme,
    Storage,
    group_block,
    integer,
    pattern,
    unsupported,
)

_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", *_PLAIN, "mixed-precision")
_LEAST_ACTIVATION_BITS = 8


def compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    """Config groups with their targets. Schemes of activations and of KV change nothing here."""
    form = config.get("format")
    if form not in _FORMATS:
        raise unsupported(f"compressed-tensors' format {form!s:.40}", ", ".join(_FORMATS))
    if _mapping(config, "sparsity_config").get("format", "dense") != "dense":
        raise unsupported("sparse weights (sparsity_config)", "dense matrices")
    if _mapping(config, "transform_config").get("config_groups"):
        raise unsupported("rotations that are part of the model (transform_config)", "models without")
    found = dict(_targets(config, form))
    schemes = [scheme for scheme in found.values() if scheme is not None]
    if not schemes:
        raise unsupported("no weights that are quantised", "config_groups with weights")
    rules = [Rule(_matcher(name), None) for name in _list(config, "ignore")]
    # The order of compressed_tensors.utils.match: exact names, then patterns, then classes.
    targets = sorted(found, key=lambda target: (target == "Linear", target.startswith("re:"), target))
    rules += (Rule(_matcher(name), found[name]) for name in targets)
    return Quantisation(_label(schemes[0]), rules)


def fp8(config: Mapping[str, Any]) -> Quantisation:
    """quant_method "fp8": float8 with a scale for a block of 128 x 128 (FineGrainedFP8), or for a matrix."""
    if config.get("expert_dtype", "fp8") != "fp8":
        raise unsupported(f"experts in {config['expert_dtype']!s:.40} (expert_dtype)", "fp8")
    if str(config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"the format {config['fmt']!s:.40} (fmt)", "e4m3")
    size = config.get("weight_block_size")
    block = (WHOLE, WHOLE) if size is None else _block(size)
    return Quantisation("FP8", [Rule(ALL, Scheme(Storage.PLAIN, 8, block, is_float=True))])


def _targets(config: Mapping[str, Any], form: str) -> list[tuple[str, Scheme | None]]:
    groups = _mapping(config, "config_groups")
    if not all(isinstance(group, Mapping) for group in groups.values()):
        raise unsupported("the names of schemes only (config_groups)", "schemes in full")
    return [
        (str(target), _scheme(group, group.get("format") or form))
        for group in groups.values()
        for target in _list(group, "targets")
    ]


def _scheme(group: Mapping[str, Any], form: Any) -> Scheme | None:
    """The scheme of a config group; None if its weights are dense."""
    weights = _mapping(group, "weights")
    if not weights or form == "dense":
        return None
    activations = _mapping(group, "input_activations")
    if activations and integer(activations, "num_bits", default=8) < _LEAST_ACTIVATION_BITS:
        raise unsupported(f"activations with {activations['num_bits']} bits", "8 bits and more")
    if form not in _FORMATS[:-1]:
        raise unsupported(f"compressed-tensors' format {form!s:.40}", ", ".join(_FORMATS))
    bits, kind = integer(weights, "num_bits", default=8), weights.get("type", "int")
    allowed = (4, 8) if form == "pack-quantized" and kind == "int" else (8,)
    if bits not in allowed or kind not in ("int", "float"):
        raise unsupported(f"weights of {kind!s:.20} with {bits} bits", "int with 4 and 8 bits, float with 8")
    return Scheme(
        Storage.PACKED if form == "pack-quantized" else Storage.PLAIN,
        bits,
        _block_of(weights),
        symmetric=weights.get("symmetric", True) is not False,
        is_float=kind == "float",
        scattered=weights.get("actorder") in ("group", "dynamic", True),
    )


def _block_of(weights: Mapping[str, Any]) -> tuple[int, int]:
    strategy, group = weights.get("strategy"), integer(weights, "group_size", default=-1)
    if strategy is None:
        strategy = "tensor" if weights.get("group_size") is None else "channel" if group == -1 else "group"
    if strategy == "tensor":
        return WHOLE, WHOLE
    if strategy in ("channel", "group"):
        return group_block(-1 if strategy == "channel" else group)
    if strategy == "block":
        return _block(weights.get("block_structure"))
    raise unsupported(f"the strategy {strategy!s:.40} of weights", "tensor, channel, group and block")


def _block(size: Any) -> tuple[int, int]:
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return size[0], size[1]
    raise unsupported(f"blocks of {size!s:.40}", "two positive numbers, such as [128, 128]")


def _label(scheme: Scheme) -> str:
    return "FP8" if scheme.is_float else f"INT{scheme.bits}"


def _matcher(target: Any) -> "regex.Pattern[str]":
    """What a target matches: "re:PATTERN" names, "Linear" all modules, anything else the module itself."""
    if isinstance(target, str) and target.startswith("re:"):
        return pattern(target.removeprefix("re:"))
    return ALL if target == "Linear" else pattern(rf"{regex.escape(str(target))}\Z")


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise unsupported(f"{name}: {value!r:.40}", "an object")
    return value


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    value = config.get(name) or []
    if not isinstance(value, list):
        raise unsupported(f"{name}: {value!r:.40}", "a list")
    return value
