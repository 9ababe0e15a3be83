"""TritonLayerKernels: RMS norms with residual sums and gated activations on GPUs.

Importing this module needs `triton`, which CUDA builds of torch install.
"""

import torch
import triton
import triton.language as tl

from shoal.execute.current_device import on_device
from shoal.execute.gpu.kernels.sizes import cdiv, power_of_2
from shoal.execute.linear.native_product import Activation

ACTIVATION_BLOCK = 1024
"""Outputs of a gated activation that a program computes."""
_ELEMENTS_PER_WARP = 512
_WARPS = (1, 16)
"""Fewest and most warps of a program that computes a row."""


class TritonLayerKernels:
    """The Kernels for GPUs.

    A row has the same bits if its sum and norm are computed in one call or in two. Therefore no multiply-add
    is fused.
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        _launch_norm(x, None, None, None, scale, out, eps)
        return out

    def residual_norm(
        self,
        x: torch.Tensor,
        before: torch.Tensor | None,
        residual: torch.Tensor,
        after: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(x)
        out = total if after is None else torch.empty_like(x)
        _launch_norm(x, before, residual, total, after, out, eps)
        return total, out

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, both = gate_up.shape
        size = both // 2
        out = gate_up.new_empty((rows, size))
        if rows:
            grid = (rows, cdiv(size, ACTIVATION_BLOCK))
            _gated_activation[grid](
                gate_up, out, size, ACTIVATION=int(activation), BLOCK=ACTIVATION_BLOCK, enable_fp_fusion=False
            )
        return out


def smoke_test(device: torch.device) -> str | None:
    """Run the kernels once; returns why they fail (no C compiler, an unsupported GPU), or None if they
    run."""
    kernels = TritonLayerKernels()
    x, scale = torch.ones((1, 16), device=device), torch.ones(8, device=device)
    try:
        with on_device(device):
            half = kernels.gated_activation(x, Activation.SILU)
            kernels.residual_norm(half, scale, half, scale, 1e-6)
            kernels.norm(half, scale, 1e-6)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _launch_norm(
    x: torch.Tensor,
    before: torch.Tensor | None,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    after: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    rows, size = x.shape
    if not rows:
        return
    width = power_of_2(size)
    fewest, most = _WARPS
    _residual_norm[(rows,)](
        x,
        before,
        residual,
        total,
        after,
        out,
        size,
        eps,
        WIDTH=width,
        num_warps=max(fewest, min(most, width // _ELEMENTS_PER_WARP)),
        enable_fp_fusion=False,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _residual_norm(  # type: ignore[no-untyped-def]
    x, before, residual, total, after, out, size, eps, WIDTH: tl.constexpr
):
    """total = residual + norm(x) * before, out = norm(total) * after, of one row.

    Without ``before`` x is added as it is, without ``residual`` nothing is added, without ``after`` there is
    no ``out``. What is rounded for ``total`` is rounded before it is used again.
    """
    at = tl.arange(0, WIDTH)
    there = at < size
    row = tl.program_id(0).to(tl.int64) * size
    dtype = out.dtype.element_ty
    value = tl.load(x + row + at, mask=there, other=0.0).to(tl.float32)
    if before is not None:
        scale = tl.load(before + at, mask=there, other=0.0)
        value = (value * _norm_factor(value, size, eps) * scale).to(dtype).to(tl.float32)
    if residual is not None:
        value = tl.load(residual + row + at, mask=there, other=0.0).to(tl.float32) + value
        rounded = value.to(dtype)
        tl.store(total + row + at, rounded, mask=there)
        value = rounded.to(tl.float32)
    if after is not None:
        scale = tl.load(after + at, mask=there, other=0.0)
        normed = value * _norm_factor(value, size, eps) * scale
        tl.store(out + row + at, normed.to(dtype), mask=there)


@triton.jit
def _norm_factor(value, size, eps):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_activation(  # type: ignore[no-untyped-def]
    gate_up, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """activation(gate) * up of a part of one row; ACTIVATION: number of an ``Activation``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == 1:  # SILU
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 2:  # GELU_TANH: (1 + tanh u) / 2 = 1 / (1 + e^-2u)
        cubic = gate * gate * gate * 0.044715
        gate = gate / (1.0 + tl.exp((gate + cubic) * -1.59576912))
    else:  # GELU_ERF
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.707106781))
    tl.store(out + row * size + at, (gate * up).to(out.dtype.element_ty), mask=there)
