"""Building `transformers` modules in a dtype without telling other threads, whose steps go on meanwhile."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

_MAKERS = frozenset(
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
"""What makes tensors of the default dtype."""


class _DefaultDtype(TorchFunctionMode):
    """In this thread, tensors that are made without a dtype and have the default one get another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``."""
        given = kwargs or {}
        made = func(*args, **given)
        if func not in _MAKERS or given.get("dtype") is not None or made.dtype != torch.get_default_dtype():
            return made
        if args and isinstance(args[0], torch.Tensor | np.ndarray):
            return made  # in the dtype of those
        return made.to(self._dtype)


def keep_dtypes_local() -> None:
    """From now on `transformers` sets the dtype of a module that it builds for its own thread only.

    By itself it changes torch's default meanwhile, which is that of all threads.
    """
    modeling_utils.local_torch_dtype = lambda dtype, model_class_name=None: _DefaultDtype(dtype)
