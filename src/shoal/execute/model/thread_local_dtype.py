"""A default dtype for building `transformers` modules that applies to the building thread only."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

_FACTORIES = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.scalar_tensor,
        torch.tensor,
        torch.zeros,
    }
)
"""Functions that create tensors of the default dtype."""


class _DefaultDtype(TorchFunctionMode):
    """In this thread, tensors that are created without a dtype get ``dtype`` instead of the default."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        if (
            func not in _FACTORIES
            or given.get("dtype") is not None
            or made.dtype != torch.get_default_dtype()
        ):
            return made
        if args and isinstance(args[0], torch.Tensor | np.ndarray):
            return made  # keeps the dtype of its argument
        return made.to(self._dtype)


def keep_dtypes_local() -> None:
    """Patch `transformers` to set the default dtype only for the thread that builds a module.

    Unpatched, it changes torch's default dtype meanwhile, which would affect the steps of other threads.
    """
    modeling_utils.local_torch_dtype = lambda dtype, model_class_name=None: _DefaultDtype(dtype)
