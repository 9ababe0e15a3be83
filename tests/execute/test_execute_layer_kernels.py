"""Norms and activations of the native library against their formulas, for every instruction set."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from native_variants import each_variant
from shoal.execute.linear.layer_kernels import LayerKernels
from shoal.execute.linear.native_product import Activation
from shoal.native import NativeLibrary, native_variants

DTYPES = (torch.float32, torch.bfloat16)
FORMULAS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}
GRAPH_SIZES = st.one_of(st.integers(1, 70), st.sampled_from([576, 577, 1536]))


def draw(rows: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn((rows, size), generator=generator)).to(dtype)


def exact_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), tuple(scale.shape), scale.double(), eps)


def assert_rounded(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """``ours`` is ``exact`` up to float32's errors (of numbers up to about 100) and one rounding."""
    one_rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=one_rounding, atol=1e-5)


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 40), size=GRAPH_SIZES, seed=st.integers(0, 99))
@settings(max_examples=examples(100))
def test_norms_and_residual_sums(
    rows: int, size: int, seed: int, dtype: torch.dtype, native: NativeLibrary
) -> None:
    kernels, eps = LayerKernels(native), 1e-5
    x, residual = draw(rows, size, dtype, seed), draw(rows, size, dtype, seed + 1)
    before, after = draw(2, size, torch.float32, seed + 2)
    assert_rounded(kernels.norm(x, after, eps), exact_norm(x, after, eps))
    for scale in (None, before):
        addend = x if scale is None else kernels.norm(x, scale, eps)
        total, out = kernels.residual_norm(x, scale, residual, after, eps)
        assert_rounded(total, residual.double() + addend.double())
        assert_rounded(out, exact_norm(total, after, eps))
        again, same = kernels.residual_norm(x, scale, residual, None, eps)
        assert torch.equal(again, total)
        assert same is again


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FORMULAS)
@given(rows=st.integers(1, 20), size=GRAPH_SIZES, seed=st.integers(0, 99))
@settings(max_examples=examples(60))
def test_gated_activations(
    rows: int, size: int, seed: int, activation: Activation, dtype: torch.dtype, native: NativeLibrary
) -> None:
    gate_up = draw(rows, 2 * size, dtype, seed)
    ours = LayerKernels(native).gated_activation(gate_up, activation)
    gate, up = gate_up.double().split(size, dim=1)
    assert_rounded(ours, FORMULAS[activation](gate) * up)


@each_variant
@pytest.mark.parametrize("activation", FORMULAS)
def test_activations_of_extreme_gates(activation: Activation, native: NativeLibrary) -> None:
    gates = torch.tensor([[-1e9, -200.0, -90.0, -0.0, 90.0, 200.0, 1e9, float("nan")]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    ours = LayerKernels(native).gated_activation(gate_up, activation)
    torch.testing.assert_close(ours, FORMULAS[activation](gates), rtol=1e-6, atol=1e-25, equal_nan=True)


def everything(kernels: LayerKernels, gate_up: torch.Tensor) -> list[torch.Tensor]:
    """All results for one input, whose halves serve as x and residual."""
    x, residual = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    scale = draw(1, x.shape[1], torch.float32, 5)[0]
    return [
        *kernels.residual_norm(x, scale, residual, scale, 1e-6),
        *[kernels.gated_activation(gate_up, activation) for activation in FORMULAS],
    ]


@pytest.mark.skipif(not native_variants(), reason="the native library is not in use")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    gate_up = draw(19, 2 * 333, dtype, 3)
    first, *others = [everything(LayerKernels(native), gate_up) for native in native_variants()]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_with_others(dtype: torch.dtype, native: NativeLibrary) -> None:
    kernels, gate_up = LayerKernels(native), draw(300, 2 * 320, dtype, 4)
    together, alone = everything(kernels, gate_up), everything(kernels, gate_up[17:18])
    assert all(torch.equal(rows[17:18], row) for rows, row in zip(together, alone, strict=True))
