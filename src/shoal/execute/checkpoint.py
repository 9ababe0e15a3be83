"""From a model folder to a `transformers` module that has all its weights from there, or a refusal."""

import logging
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers import __version__ as transformers_version

from shoal.core import ModelUnsupported
from shoal.models import check_config, check_weights, read_weight_headers, refuse_incomplete, some_of

_log = logging.getLogger(__name__)


def read_model_config(name: str, folder: Path) -> Any:
    """The folder's configuration as `transformers` reads it, without what it says of kernels.

    name: of the model, for the error. Raises ModelUnsupported if transformers cannot read it, or its model
    would take code from the folder; ModelUnavailable if the file is broken.
    """
    check_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever its code stumbles over in a file that somebody else wrote
        raise _cannot("read", name, error) from None
    # How attention and experts are computed is for us to say; a folder may name code on a hub here.
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def load_module(
    model_class: Any, folder: Path, config: Any, name: str, dtype: torch.dtype, **options: Any
) -> Any:
    """The model of ``config`` with its weights from the safetensors files of ``folder``, on the CPU.

    model_class: of `transformers`. options: for its ``from_pretrained``. Raises ModelUnsupported where a
    weight is missing or has another shape, ModelUnavailable where the files are damaged. Tensors that the
    model does not use are logged.
    """
    check_weights(folder)
    if not isinstance(config, model_class.config_class):  # a multimodal one, of which only the text is read
        config = config.get_text_config()
    try:
        _refuse_if_far_larger(model_class, folder, config, name)
        module, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that they can be named below
            output_loading_info=True,
            **options,
        )
    except ModelUnsupported:
        raise
    except Exception as error:  # as above
        raise _cannot("load", name, error) from None
    refuse_incomplete(info, name)
    if info["unexpected_keys"]:
        _log.warning("%s: not used of its files: %s", name, some_of(info["unexpected_keys"]))
    return module


def _refuse_if_far_larger(model_class: Any, folder: Path, config: Any, name: str) -> None:
    """Raise ModelUnsupported before memory is taken for a model that config.json makes far too large.

    Up to twice the size goes on, as tied weights are stored once: what is missing is then named.
    """
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in model_class(deepcopy(config)).parameters())
    stored = sum(prod(tensor.shape) for tensor in read_weight_headers(folder).values())
    if wanted > 2 * stored:
        raise ModelUnsupported(
            f"{name}: config.json describes {wanted:.3g} parameters, but the weight files hold {stored:.3g}"
        )


def _cannot(do: str, name: str, error: Exception) -> ModelUnsupported:
    first_line = (str(error).strip().splitlines() or [""])[0]
    problem = f"{type(error).__name__}: {first_line:.300}"
    return ModelUnsupported(f"{name}: transformers {transformers_version} cannot {do} it: {problem}")
