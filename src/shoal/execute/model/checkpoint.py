"""Loading the config and weights of a model folder as a `transformers` module, or rejecting the model."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers import __version__ as transformers_version
from transformers.pytorch_utils import Conv1D

from shoal.core import ModelUnsupported, ShoalError
from shoal.execute.model.thread_local_dtype import keep_dtypes_local
from shoal.execute.quantised.matrix import QuantisedMatrix
from shoal.execute.quantised.weights import open_slices
from shoal.models import check_config, check_weights, read_weight_headers, refuse_incomplete, summarize_names

_log = logging.getLogger(__name__)


@contextmanager
def unsupported_on_error(do: str, name: str) -> Iterator[None]:
    """Turn any error of transformers' code, which reads untrusted files, into ModelUnsupported.

    do: a verb for the error message, such as "load". name: name of the model.
    """
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {first_line:.300}"
        raise ModelUnsupported(
            f"{name}: transformers {transformers_version} cannot {do} it: {problem}"
        ) from error


def read_model_config(name: str, folder: Path) -> Any:
    """The folder's configuration as `transformers` reads it, without its choice of kernels.

    name: name of the model, for errors. Raises ModelUnsupported if transformers cannot read it or would run
    code from the folder, ModelUnavailable if the file is broken.
    """
    check_config(folder)
    with unsupported_on_error("read", name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # We choose how attention and experts are computed; a folder may name code on a hub here.
    config._attn_implementation = None
    config._experts_implementation = None
    # Weights are dequantised here; transformers would ask for the packages of their formats.
    for part in (config, config.get_text_config()):
        for field in ("quantization_config", "compression_config"):
            if hasattr(part, field):
                delattr(part, field)
    return config


def load_module(
    model_class: Any, folder: Path, config: Any, name: str, dtype: torch.dtype, **options: Any
) -> Any:
    """The model of ``config`` with its weights from the safetensors files of ``folder``, on the CPU.

    model_class: of `transformers`. options: for its ``from_pretrained``. Raises ModelUnsupported if a weight
    is missing or has a wrong shape, ModelUnavailable if files are damaged. Unused tensors are logged.
    """
    check_weights(folder)
    if not isinstance(config, model_class.config_class):  # multimodal: only its text model is loaded
        config = config.get_text_config()
    keep_dtypes_local()
    with unsupported_on_error("load", name), open_slices(folder) as slices:
        with torch.device("meta"):
            described = model_class(deepcopy(config))
        _refuse_if_far_larger(described, folder, name)
        _refuse_transposed(described, slices, name)
        module, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=slices,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that all can be reported below
            output_loading_info=True,
            **options,
        )
    refuse_incomplete(info, name)
    if info["unexpected_keys"]:
        _log.warning("%s: not used of its files: %s", name, summarize_names(info["unexpected_keys"]))
    return module


def _refuse_transposed(described: nn.Module, slices: Mapping[str, Any], name: str) -> None:
    """Raise ModelUnsupported for quantised weights of a model that has them as [inputs, outputs], as GPT-2.

    described: the model without memory.
    """
    quantised = any(isinstance(part, QuantisedMatrix) for part in slices.values())
    if quantised and any(isinstance(layer, Conv1D) for layer in described.modules()):
        raise ModelUnsupported(
            f"{name}: quantised weights are read for models with linear layers only, and this one has Conv1D;"
            " use the folder that it was made of"
        )


def _refuse_if_far_larger(described: nn.Module, folder: Path, name: str) -> None:
    """Raise ModelUnsupported, before memory is allocated, if config.json describes a far larger model.

    described: that model without memory. Up to twice the stored size is allowed, because tied weights are
    stored once; missing weights are reported later.
    """
    wanted = sum(parameter.numel() for parameter in described.parameters())
    stored = sum(prod(tensor.shape) for tensor in read_weight_headers(folder).values())
    if wanted > 2 * stored:
        raise ModelUnsupported(
            f"{name}: config.json describes {wanted:.3g} parameters, but the weight files hold {stored:.3g}"
        )
