"""Reading quantization_config in config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core import ModelUnsupported
from shoal.models.folder.json_files import read_json, text_config
from shoal.models.quantised.awq_gptq import awq, gptq
from shoal.models.quantised.compressed_tensors import compressed_tensors, fp8
from shoal.models.quantised.scheme import Quantisation

_METHODS = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors, "fp8": fp8}
POSSIBLE = f"weights in float32, bfloat16 or float16, quantised ones ({', '.join(_METHODS)}), and GGUF files"


def quantisation_of(config: Mapping[str, Any], folder: Path) -> Quantisation | None:
    """The quantisation of the language model of a config.json; None for dense weights.

    folder: of that file. Raises ModelUnsupported, with what is possible, if it is not read.
    """
    found = _stated(config)
    if not found:
        return None
    fields = found if isinstance(found, Mapping) else {"quant_method": found}
    method = str(fields.get("quant_method", "compressed-tensors"))
    if method not in _METHODS:
        raise ModelUnsupported(
            f"{folder} is quantised ({method:.40}), which is not read here; possible are {POSSIBLE}"
        )
    try:
        return _METHODS[method](fields)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{folder} is quantised ({method}): {error}") from None


def stated_quantisation(folder: Path) -> Any:
    """What config.json in ``folder`` says of quantisation, unchecked; None if nothing."""
    return _stated(read_json(folder / "config.json"))


def _stated(config: Mapping[str, Any]) -> Any:
    fields = ("quantization_config", "compression_config")
    said = (part.get(field) for part in (text_config(config), config) for field in fields)
    return next(filter(None, said), None)
