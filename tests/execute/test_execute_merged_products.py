"""The products of fused layers compute what the layers do, side by side or gated."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from execute_builders import needs_native
from linear_builders import quantised_linear
from torch import nn

from shoal.execute.linear.layer_kernels import LayerKernels
from shoal.execute.linear.merged_products import FastProductBuilder, SeparateLinears
from shoal.execute.linear.native_product import Activation
from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.linear.packed_weights import pack_int8
from shoal.native import load_native

pytestmark = needs_native


def make_linears(outputs: Sequence[int], dtype: torch.dtype) -> list[nn.Linear]:
    """Every second one has a bias."""
    torch.manual_seed(len(outputs))
    return [nn.Linear(64, n, bias=at % 2 == 0, dtype=dtype) for at, n in enumerate(outputs)]


def make_int8(outputs: Sequence[int], grouped: bool) -> list[PackedLinear]:
    made = []
    for linear in make_linears(outputs, torch.bfloat16):
        if grouped:
            values = torch.randint(-127, 128, linear.weight.shape).to(torch.int8)
            weights = pack_int8(values, torch.rand((len(values), 2)), linear.bias)
            made.append(PackedLinear(weights, load_native()))
        else:
            made.append(quantised_linear(linear.weight, linear.bias))
    return made


def fast_products() -> FastProductBuilder:
    native = load_native()
    assert native is not None
    return FastProductBuilder(LayerKernels(native))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [[64], [64, 32, 32], [48, 17], [5, 5]])
@torch.inference_mode()
def test_merged_dense_layers(outputs: list[int], dtype: torch.dtype) -> None:
    linears = make_linears(outputs, dtype)
    x = torch.randn((3, 64), dtype=dtype)
    expected = torch.cat([linear(x) for linear in linears], dim=1)
    torch.testing.assert_close(fast_products().merged(linears)(x), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_gated_dense_layers(dtype: torch.dtype) -> None:
    gate, up = make_linears([40, 40], dtype)
    x = torch.randn((3, 64), dtype=dtype)
    gated = fast_products().gated(gate, up, Activation.GELU_TANH)(x)
    expected = F.gelu(gate(x), approximate="tanh") * up(x)
    torch.testing.assert_close(gated, expected, rtol=2**-6, atol={torch.float32: 1e-5}.get(dtype, 1e-2))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("outputs", [[64], [64, 32, 32], [48, 17]])
@torch.inference_mode()
def test_merged_int8_layers(outputs: list[int], grouped: bool) -> None:
    linears = make_int8(outputs, grouped)
    x = torch.randn((3, 64), dtype=torch.bfloat16)
    assert torch.equal(fast_products().merged(linears)(x), SeparateLinears(linears)(x))


@torch.inference_mode()
def test_gated_int8_layers() -> None:
    gate, up = make_int8([40, 40], grouped=False)
    x = torch.randn((3, 64), dtype=torch.bfloat16)
    gated = fast_products().gated(gate, up, Activation.SILU)(x)
    torch.testing.assert_close(gated, F.silu(gate(x)) * up(x), rtol=2**-6, atol=1e-2)


@torch.inference_mode()
def test_layers_of_different_kinds_stay_separate() -> None:
    linears = [*make_linears([32], torch.float32), *make_int8([32], grouped=False)]
    x = torch.randn(3, 64)
    assert torch.equal(fast_products().merged(linears)(x), SeparateLinears(linears)(x))
