"""Selection of the attention backend of a model: native, triton, batched or reference."""

import logging
from importlib.util import find_spec

import torch

from shoal.core import ConfigError
from shoal.execute.attention.native_backend import NativeAttention, can_attend
from shoal.execute.attention.torch_backends import BatchedAttention, PagedAttention, ReferenceAttention
from shoal.kvcache import KVShape
from shoal.native import load_native

_log = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("auto", "reference", "batched", "native", "triton")
"""Names that a user may choose."""


def check_backend(name: str, device: torch.device) -> None:
    """Raise ConfigError if there is no attention backend called ``name``, or it does not run here."""
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"attention backend {name!r} is not known; possible are {', '.join(ATTENTION_BACKENDS)}"
        )
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"attention backend 'native' is for CPUs, and the device is {device}; 'auto' fits")
    if name == "triton" and device.type != "cuda":
        raise ConfigError(f"attention backend 'triton' is for GPUs, and the device is {device}; 'auto' fits")
    if name == "triton" and find_spec("triton") is None:
        raise ConfigError(
            "attention backend 'triton' needs the package triton, which is not installed; 'auto' does without"
        )
    if name == "native" and load_native() is None:
        raise ConfigError(
            "attention backend 'native' needs the native library, which was not built here or is switched "
            "off (SHOAL_NATIVE); 'auto' does without"
        )


def choose_backend(name: str, device: torch.device, shape: KVShape) -> type[PagedAttention]:
    """The backend for a model; ``batched`` where our kernels do not support its KV shape."""
    if name == "auto":
        name = _fastest_backend(device)
    if name == "triton":
        # Importing it needs triton, which CPU builds of torch do not include.
        from shoal.execute.gpu.step import TritonAttention
        from shoal.execute.gpu.support import can_attend as can_attend_on_gpu
        from shoal.execute.gpu.support import smoke_test

        if not can_attend_on_gpu(shape):
            return BatchedAttention
        if (reason := smoke_test(shape, device)) is None:
            return TritonAttention
        _log.warning("Triton's kernels do not run here, torch's operations are used instead: %s", reason)
        return BatchedAttention
    if name == "native":
        return NativeAttention if can_attend(shape) else BatchedAttention
    return ReferenceAttention if name == "reference" else BatchedAttention


def _fastest_backend(device: torch.device) -> str:
    """The backend with our own kernels for a device, if they are installed; else ``batched``."""
    if device.type == "cpu":
        return "batched" if load_native() is None else "native"
    return "batched" if find_spec("triton") is None else "triton"
