"""The subprocess that converts GGUF files and tokenizers with torch and transformers.

``python -m shoal.models.conversion.convert gguf|tokenizer|added-tokens SOURCE FOLDER``

This module and ``gguf.int8_groups`` are the only ones of ``shoal.models`` that import torch and
transformers. It reports on standard output, one JSON object per line: ``{"what", "done", "total"}`` or
``{"error", "broken"}``, where ``broken`` says that the model's files are broken.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable, ShoalError
from shoal.models.folder.weights import COMPLETE, GROUPS_FILE, refuse_incomplete
from shoal.models.gguf.config import transformers_config
from shoal.models.gguf.file import GgufFile
from shoal.models.gguf.rope import TENSORS as ROPE_TENSORS
from shoal.models.gguf.tensor_names import gguf_names
from shoal.models.gguf.text_metadata import keep_text_metadata
from shoal.models.tokenizer.added_tokens import write_complete

_STEPS = 4
_LOADED_AS = {"mistral": "llama"}
"""Model types that transformers cannot load from GGUF files, and types with the same tensors."""
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
"""Run no code from the folder, and load nothing from a network."""


def main(arguments: list[str]) -> int:
    """Convert as the arguments say; returns the exit status."""
    kind, source, folder = arguments[0], Path(arguments[1]), Path(arguments[2])
    # Progress bars would fill the pipe of standard error, which is read only at the end.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            if kind == "gguf":
                _convert_gguf(source, folder)
            elif kind == "added-tokens":
                write_complete(source, folder)
            else:
                _convert_tokenizer(source, folder)
        except ModelUnavailable as problem:
            _send({"error": str(problem), "broken": True})
            return 1
        except ShoalError as problem:
            _send({"error": str(problem)})
            return 1
        except Exception as problem:  # the parent shows it to the user
            _send({"error": f"{type(problem).__name__}: {problem}"})
            return 1
    return 0


def _send(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


def _step(what: str, done: int) -> None:
    _send({"what": what, "done": done, "total": _STEPS})


def _convert_gguf(source: Path, folder: Path) -> None:
    _step("starting the conversion", 0)
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer

    reader = GGUFReader(source)  # once: it takes seconds for a large vocabulary
    file = GgufFile(reader)
    _refuse_too_many_layers(reader)
    config = AutoConfig.for_model(**transformers_config(file))
    _step("converting the tokenizer", 1)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **_LOCAL)
    tokenizer.save_pretrained(folder)
    _restore_pre_tokenizer(reader, folder / "tokenizer.json")
    _step("converting the weights", 2)
    model = _load_gguf(source, config)
    file.refuse_unused({*gguf_names(model, file.architecture), *ROPE_TENSORS})
    _step("saving the weights", 3)
    model.save_pretrained(folder)
    _save_config(config, folder)
    keep_text_metadata(reader, folder)
    _keep_int8_groups(reader, model, folder)
    _step("converted", _STEPS)


def _load_gguf(source: Path, config: Any) -> Any:
    """The model in the file, with dense bfloat16 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = _LOADED_AS.get(config.model_type)
    if known is not None:
        config = AutoConfig.for_model(**config.to_dict() | {"model_type": known})
    model, info = AutoModelForCausalLM.from_pretrained(
        source.parent,
        config=config,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that all can be reported
        **_LOCAL,
        **_dequantize(),
    )
    refuse_incomplete(info, source.name)
    return model


def _save_config(config: Any, folder: Path) -> None:
    """Write config.json; the model may have been loaded with the config of a similar class (_LOADED_AS)."""
    import torch
    from transformers import AutoModelForCausalLM

    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)


def _keep_int8_groups(reader: Any, model: Any, folder: Path) -> None:
    """Store the quantised layers of the file in int8 in GROUPS_FILE, for ``dtype: int8``."""
    from safetensors.numpy import save_file

    from shoal.models.gguf.int8_groups import int8_groups

    groups, complete = int8_groups(reader, model)
    if groups:
        save_file(groups, folder / GROUPS_FILE, metadata={COMPLETE: str(complete)})


def _dequantize() -> dict[str, Any]:
    """Options for dense weights; transformers versions without GgufConfig always give dense weights."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _refuse_too_many_layers(reader: Any) -> None:
    """Reject a wrong layer count early, since the model is built before its weights are read."""
    for name, field in reader.fields.items():
        if name.endswith(".block_count") and field.contents() > len(reader.tensors):
            raise ValueError(f"{name} is {field.contents()}, but the file has {len(reader.tensors)} tensors")


def _restore_pre_tokenizer(reader: Any, tokenizer_file: Path) -> None:
    """Restore a pre-tokenizer that transformers' conversion gets wrong.

    SmolLM's tokenizer splits digits before words, so blanks before a number stay together; the converted
    tokenizer would attach one of them to the number.
    """
    from tokenizers import Tokenizer, pre_tokenizers

    field = reader.fields.get("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(tokenizer_file))


def _convert_tokenizer(source: Path, folder: Path) -> None:
    _step("converting the tokenizer", 1)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_LOCAL)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError("it is code in the folder (auto_map), which is never run here") from error
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError("transformers has no fast tokenizer for this model")
    _step("converted", _STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
