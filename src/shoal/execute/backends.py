"""The attention backends, and which of them a model gets."""

import torch

from shoal.core import ConfigError
from shoal.execute.native_attention import NativeStep, can_attend
from shoal.execute.paged import BatchedStep, PagedStep, ReferenceStep
from shoal.kvcache import KVShape
from shoal.native import load_native

BACKENDS: dict[str, type[PagedStep]] = {
    "reference": ReferenceStep,
    "batched": BatchedStep,
    "native": NativeStep,
}
"""Attention backends by the name that a user chooses."""
ATTENTION_BACKENDS = ("auto", *BACKENDS)
"""What a user may choose."""


def check_backend(name: str, device: torch.device) -> None:
    """Raise ConfigError if there is no attention backend called ``name``, or it does not run here."""
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"attention backend {name!r} is not known; possible are {', '.join(ATTENTION_BACKENDS)}"
        )
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"attention backend 'native' is for CPUs, and the device is {device}; 'auto' fits")
    if name == "native" and load_native() is None:
        raise ConfigError(
            "attention backend 'native' needs the native library, which was not built here or is switched "
            "off (SHOAL_NATIVE); 'auto' does without"
        )


def choose_backend(name: str, device: torch.device, shape: KVShape) -> type[PagedStep]:
    """The backend for a model; where the native kernels cannot do its shape, torch's operations."""
    if name == "auto":
        name = "native" if device.type == "cpu" and load_native() is not None else "batched"
    if name == "native" and not can_attend(shape):
        name = "batched"
    return BACKENDS[name]
