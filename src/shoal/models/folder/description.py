"""ModelDescription for users: family, sizes, format and quantisation of a model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shoal.models.conversion.run_conversion import SOURCE_FILE
from shoal.models.download.catalog import BUNDLED
from shoal.models.folder.facts import read_facts
from shoal.models.folder.json_files import read_json, text_config
from shoal.models.folder.weights import groups_file, weight_files
from shoal.models.gguf.header import gguf_quantisation
from shoal.models.quantised.config import quantisation_of
from shoal.models.quantised.tensors import read_weight_headers

# GGUF's names for weights that are loaded in these dtypes. int8 has a scale for each 32 elements, as Q8_0
# does, or for each row.
_LOADED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model."""

    family: str
    """Architecture family in config.json: ``llama``, ``qwen3``."""
    format: str
    """Format of its source: ``gguf``, ``safetensors``, or ``random`` for random weights."""
    parameters: int
    quantisation: str
    """Type of its weights, as GGUF names it: ``Q4_K_M``, ``BF16``; of other quantised files ``AWQ-INT4``."""
    size_bytes: int
    """Size of its weights on disk."""
    digest: str
    """64 hexadecimal digits, which change with the weight files."""
    modified_s: float
    """Modification time of its weights, in seconds since 1970."""
    layers: int
    hidden: int | None
    """Hidden size; None if config.json does not have it."""
    heads: int
    kv_heads: int
    vocab_size: int


def describe_model(name: str, folder: Path, dtype: str) -> ModelDescription:
    """Describe the model ``name`` in ``folder``, whose weights were loaded as ``dtype``.

    Raises ModelUnavailable or ModelUnsupported if its files cannot be read.
    """
    groups = groups_file(folder)
    files = [*weight_files(folder), *([] if groups is None else [groups])]
    stats = [file.stat() for file in files]
    # Not a hash of the contents, which would take minutes for large models.
    identity = [(file.name, s.st_size, s.st_mtime_ns) for file, s in zip(files, stats, strict=True)]
    stored = _gguf(name, folder)
    quantisation = quantisation_of(read_json(folder / "config.json"), folder)
    return ModelDescription(
        format="safetensors" if stored is None else "gguf",
        parameters=sum(prod(tensor.shape) for tensor in read_weight_headers(folder).values()),
        quantisation=stored or (_LOADED.get(dtype, dtype) if quantisation is None else quantisation.label),
        size_bytes=sum(s.st_size for s in stats),
        digest=_digest(name, identity),
        modified_s=max(s.st_mtime for s in stats),
        **_sizes(folder),
    )


def describe_random_model(
    name: str, folder: Path, dtype: str, *, parameters: int, weights: str
) -> ModelDescription:
    """Describe the model ``name`` with the config.json in ``folder`` and random weights.

    weights: identifies them among all with this config.json. Raises as ``describe_model``.
    """
    config = (folder / "config.json").stat()
    return ModelDescription(
        format="random",
        parameters=parameters,
        quantisation=_LOADED.get(dtype, dtype),
        size_bytes=0,
        digest=_digest(name, [weights, config.st_size, config.st_mtime_ns]),
        modified_s=config.st_mtime,
        **_sizes(folder),
    )


def _digest(name: str, identity: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps([name, identity]).encode()).hexdigest()


def _sizes(folder: Path) -> dict[str, Any]:
    """Fields from config.json."""
    facts, config = read_facts(folder), text_config(read_json(folder / "config.json"))
    return {
        "family": str(config.get("model_type", "unknown")).removesuffix("_text"),
        "layers": len(facts.layers),
        "hidden": facts.hidden,
        "heads": facts.heads,
        "kv_heads": facts.layers[0].kv_heads,
        "vocab_size": facts.vocab_size,
    }


def _gguf(name: str, folder: Path) -> str | None:
    """Quantisation of the GGUF file that a model was converted from: "" if unknown, None if not converted."""
    if name in BUNDLED:
        return BUNDLED[name].quantisation
    source = read_json(folder / SOURCE_FILE).get("gguf")
    return None if source is None else gguf_quantisation(Path(source)) or ""
