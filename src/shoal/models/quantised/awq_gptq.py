"""The quantization_config of AWQ (AutoAWQ) and GPTQ (AutoGPTQ, GPTQModel)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shoal.models.quantised.scheme import (
    ALL,
    Quantisation,
    Rule,
    Scheme,
    Storage,
    group_block,
    integer,
    pattern,
    unsupported,
)

_GPTQ_BITS = (4, 8)


def awq(config: Mapping[str, Any]) -> Quantisation:
    """AutoAWQ's format "gemm". Which modules are not quantised is seen in the files."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm" or config.get("backend") == "llm-awq":
        raise unsupported(f"AWQ's version {config.get('backend', version)!s:.40}", "version gemm")
    bits = integer(config, "bits", "w_bit", default=4)
    if bits != 4:
        raise unsupported(f"AWQ with {bits} bits", "4 bits")
    if config.get("zero_point", True) is not True:
        raise unsupported("AWQ without zero points (zero_point)", "zero_point: true")
    block = group_block(integer(config, "group_size", "q_group_size", default=128))
    return Quantisation("AWQ-INT4", [Rule(ALL, Scheme(Storage.AWQ, 4, block, symmetric=False))])


def gptq(config: Mapping[str, Any]) -> Quantisation:
    """GPTQ's formats "gptq" and "gptq_v2", with GPTQModel's settings for single modules (``dynamic``)."""
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise unsupported(f"GPTQ's checkpoint_format {form:.40}", "gptq and gptq_v2")
    if config.get("is_marlin_format"):
        raise unsupported("GPTQ in Marlin's format (is_marlin_format)", "checkpoint_format gptq and gptq_v2")
    if config.get("pack_dtype", "int32") not in ("int32", None):
        raise unsupported(f"GPTQ's pack_dtype {config['pack_dtype']!s:.40}", "int32")
    scheme = _of_gptq(config, Scheme(Storage.GPTQ, 4, (1, 128), zeros_less_one=form == "gptq"))
    return Quantisation(f"GPTQ-INT{scheme.bits}", [*_dynamic(config, scheme), Rule(ALL, scheme)])


def _of_gptq(config: Mapping[str, Any], default: Scheme) -> Scheme:
    """The scheme that ``config`` has, or else ``default``."""
    bits = integer(config, "bits", default=default.bits)
    if bits not in _GPTQ_BITS:
        raise unsupported(f"GPTQ with {bits} bits", "4 and 8 bits")
    block = group_block(integer(config, "group_size", default=default.block[1] or -1))
    symmetric, scattered = config.get("sym", default.symmetric), config.get("desc_act", default.scattered)
    return replace(default, bits=bits, block=block, symmetric=bool(symmetric), scattered=bool(scattered))


def _dynamic(config: Mapping[str, Any], default: Scheme) -> Iterator[Rule]:
    """Rules by patterns of names: "-:PATTERN" for modules that are dense, "+:PATTERN" or "PATTERN"."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise unsupported(f"dynamic: {dynamic!r:.40}", "settings by patterns of names")
    for name, settings in dynamic.items():
        if name.startswith("-:"):
            yield Rule(pattern(name[2:]), None)
        else:
            known = settings if isinstance(settings, Mapping) else {}
            yield Rule(pattern(name.removeprefix("+:")), _of_gptq(known, default))
