"""Choice of a service's dtype: what ``auto`` means, and when it means int8."""

from pathlib import Path

import torch

from shoal.core import ConfigError, Service
from shoal.execute.model.checkpoint import read_model_config
from shoal.models import is_quantised, keeps_integers
from shoal.native import load_native

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""By name. int8 is for weights of linear layers, in a model that is otherwise in bfloat16."""
FAST_INT8 = ("avx2", "avx512", "vnni", "vnni_bf16", "amx")
"""Instruction sets on which our int8 kernel is faster than bfloat16; on AMX only for few rows."""


def resolve_dtype(service: Service, folder: Path) -> torch.dtype:
    """The dtype that ``service`` names, or that of config.json for "auto"; raises ConfigError."""
    if service.dtype == "auto":
        config = read_model_config(service.model, folder).get_text_config()
        stored = getattr(config, "dtype", None)
        return next((dtype for dtype in DTYPES.values() if dtype == stored), torch.float32)
    if service.dtype not in DTYPES:
        raise ConfigError(
            f"service {service.name!r}: dtype {service.dtype!r} is not known; "
            f"possible are auto, {', '.join(DTYPES)}"
        )
    return DTYPES[service.dtype]


def prefers_int8(service: Service, folder: Path, device: torch.device) -> bool:
    """Whether "auto" means int8: for a model of quantised integers on a CPU where our kernel is fast."""
    if service.dtype != "auto" or device.type != "cpu" or service.random_seed is not None:
        return False
    native = load_native()
    fast = native is not None and native.variant in FAST_INT8
    return fast and (is_quantised(folder) or keeps_integers(folder))
