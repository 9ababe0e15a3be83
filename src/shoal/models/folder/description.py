"""What people are told of a model: its family, its sizes, and how its weights are stored."""

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
from shoal.models.folder.weights import groups_file, read_weight_headers, weight_files
from shoal.models.gguf.header import gguf_quantisation

# What GGUF's world calls weights that were loaded in these types. int8 has a scale for each 32 numbers, as
# Q8_0 has, or for each row.
_LOADED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model."""

    family: str
    """Its kind of architecture, as config.json calls it: ``llama``, ``qwen3``."""
    format: str
    """Of the file that it came from: ``gguf`` or ``safetensors``; ``random`` where its weights are that."""
    parameters: int
    """Numbers in its weights."""
    quantisation: str
    """How its weights are stored, in the words of GGUF: ``Q4_K_M``, ``BF16``."""
    size_bytes: int
    """Size of its weights on disk."""
    digest: str
    """64 hexadecimal digits, which change when a file of its weights does."""
    modified_s: float
    """When its weights were stored, in seconds since 1970."""
    layers: int
    hidden: int | None
    """Width of the residual stream, where config.json says it."""
    heads: int
    kv_heads: int
    vocab_size: int


def describe_model(name: str, folder: Path, dtype: str) -> ModelDescription:
    """Describe the model ``name``, whose files are in ``folder`` and whose weights were loaded as ``dtype``.

    Raises as reading the files does: ModelUnavailable or ModelUnsupported.
    """
    groups = groups_file(folder)
    files = [*weight_files(folder), *([] if groups is None else [groups])]
    stats = [file.stat() for file in files]
    # Hashing the content would take minutes for large models, and a file is not changed without its time.
    identity = [(file.name, s.st_size, s.st_mtime_ns) for file, s in zip(files, stats, strict=True)]
    stored = _gguf(name, folder)
    return ModelDescription(
        format="safetensors" if stored is None else "gguf",
        parameters=sum(prod(tensor.shape) for tensor in read_weight_headers(folder).values()),
        quantisation=stored or _LOADED.get(dtype, dtype),
        size_bytes=sum(s.st_size for s in stats),
        digest=_digest(name, identity),
        modified_s=max(s.st_mtime for s in stats),
        **_sizes(folder),
    )


def describe_random_model(
    name: str, folder: Path, dtype: str, *, parameters: int, weights: str
) -> ModelDescription:
    """Describe the model ``name`` of the config.json in ``folder``, whose weights are random.

    weights: names them, among all that have this config.json. Raises as ``describe_model``.
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
    """What config.json says, by field."""
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
    """How the GGUF file is quantised that a model was converted from, "" where it does not say.

    None: the model was not converted.
    """
    if name in BUNDLED:
        return BUNDLED[name].quantisation
    source = read_json(folder / SOURCE_FILE).get("gguf")
    return None if source is None else gguf_quantisation(Path(source)) or ""
