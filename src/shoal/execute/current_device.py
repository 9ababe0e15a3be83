"""Which GPU a thread uses where nobody names one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels that are not torch's are started on ``device``, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
