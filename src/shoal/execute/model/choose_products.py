"""Choice of the products and kernels of fused layers for a device."""

import logging
from importlib.util import find_spec

import torch

from shoal.execute.linear.layers import ProductBuilder
from shoal.execute.linear.merged_products import DenseProductBuilder, FastProductBuilder
from shoal.execute.model.layer_kernels import LayerKernels
from shoal.native import load_native

_log = logging.getLogger(__name__)


def choose_products(device: torch.device, *, onednn: bool = True) -> ProductBuilder | None:
    """Native ones on a CPU, Triton's on a GPU; None if the kernels are not installed or do not run.

    onednn: whether oneDNN may pack weights.
    """
    if device.type == "cpu":
        native = load_native()
        return None if native is None else FastProductBuilder(LayerKernels(native), onednn=onednn)
    if find_spec("triton") is None:
        return None
    # Importing it needs triton, which CPU builds of torch do not include.
    from shoal.execute.gpu.kernels import layer

    if (reason := layer.smoke_test(device)) is not None:
        _log.warning("Triton's kernels do not run here, so decoder layers are not fused: %s", reason)
        return None
    return DenseProductBuilder(layer.TritonLayerKernels())
