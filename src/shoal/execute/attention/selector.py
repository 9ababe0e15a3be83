"""The attention backends, and which of them a model gets."""

import logging
from importlib.util import find_spec

import torch

from shoal.core import ConfigError
from shoal.execute.attention.native_backend import NativeStep, can_attend
from shoal.execute.attention.torch_backends import BatchedStep, PagedAttention, ReferenceStep
from shoal.kvcache import KVShape
from shoal.native import load_native

_log = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("auto", "reference", "batched", "native", "triton")
"""What a user may choose."""


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
    """The backend for a model; where our kernels cannot do its shape, torch's operations."""
    if name == "auto":
        name = _fastest_on(device)
    if name == "triton":
        # Importing it needs triton, which CPU builds of torch come without.
        from shoal.execute.attention import triton_backend as triton_attention

        if not triton_attention.can_attend(shape):
            return BatchedStep
        if (reason := triton_attention.why_not(shape, device)) is None:
            return triton_attention.TritonStep
        _log.warning("Triton's kernels do not run here, torch's operations are used instead: %s", reason)
        return BatchedStep
    if name == "native":
        return NativeStep if can_attend(shape) else BatchedStep
    return ReferenceStep if name == "reference" else BatchedStep


def _fastest_on(device: torch.device) -> str:
    """The backend with kernels of ours for a device, where they are installed."""
    if device.type == "cpu":
        return "batched" if load_native() is None else "native"
    return "batched" if find_spec("triton") is None else "triton"
