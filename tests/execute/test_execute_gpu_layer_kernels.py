"""Norms and activations of Triton's kernels against their formulas."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from execute_builders import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_interpreter import strict_interpreter

from at_hand import DEVICE
from hypothesis_profiles import examples
from shoal.execute.linear.native_product import Activation

if TYPE_CHECKING:
    from shoal.execute.gpu.kernels.layer import TritonLayerKernels

pytestmark = needs_triton

FORMULAS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}
ONE_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SIZES = st.sampled_from([1, 2, 16, 17, 48, 127, 128, 576, 1023, 1025, 2880])
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
"""Of exponentials, whose reciprocals are 0."""
# Triton's interpreter does not round to bfloat16, it cuts off.
dtypes = st.sampled_from([dtype for dtype in ONE_ROUNDING if DEVICE != "cpu" or dtype != torch.bfloat16])


@pytest.fixture(scope="module")
def kernels() -> Iterator["TritonLayerKernels"]:
    from shoal.execute.gpu.kernels.layer import TritonLayerKernels

    if DEVICE != "cpu":
        yield TritonLayerKernels()
        return
    with strict_interpreter():
        yield TritonLayerKernels()


def draw(rows: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn((rows, size), generator=generator)).to(DEVICE, dtype)


def exact_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), tuple(scale.shape), scale.double(), eps)


def assert_rounded(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """``ours`` is ``exact`` up to float32's errors (of numbers up to about 100) and one rounding."""
    torch.testing.assert_close(ours.double(), exact, rtol=ONE_ROUNDING[ours.dtype], atol=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(rows=st.sampled_from([1, 2, 5]), size=SIZES, dtype=dtypes, seed=st.integers(0, 9))
def test_norms_and_residual_sums(
    kernels: "TritonLayerKernels", rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    eps = 1e-5
    x, residual = draw(rows, size, dtype, seed), draw(rows, size, dtype, seed + 10)
    before, after = draw(2, size, torch.float32, seed + 20)
    assert_rounded(kernels.norm(x, after, eps), exact_norm(x, after, eps))
    for scale in (None, before):
        addend = x if scale is None else kernels.norm(x, scale, eps)
        total, out = kernels.residual_norm(x, scale, residual, after, eps)
        assert_rounded(total, residual.double() + addend.double())
        assert_rounded(out, exact_norm(total, after, eps))
        # One call gives the bits of two.
        again, same = kernels.residual_norm(x, scale, residual, None, eps)
        assert same is again
        assert torch.equal(again, total)
        assert torch.equal(out, kernels.norm(total, after, eps))


@OVERFLOWS
@settings(max_examples=examples(40), deadline=None)
@given(
    activation=st.sampled_from(list(FORMULAS)),
    rows=st.sampled_from([1, 3]),
    size=SIZES,
    dtype=dtypes,
    seed=st.integers(0, 9),
)
def test_gated_activations(
    kernels: "TritonLayerKernels",
    activation: Activation,
    rows: int,
    size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    gate_up = draw(rows, 2 * size, dtype, seed)
    gate, up = gate_up.double().split(size, dim=1)
    assert_rounded(kernels.gated_activation(gate_up, activation), FORMULAS[activation](gate) * up)


@OVERFLOWS
@pytest.mark.parametrize("activation", FORMULAS)
def test_activations_of_extreme_gates(kernels: "TritonLayerKernels", activation: Activation) -> None:
    gates = torch.tensor([[-1e9, -200.0, -90.0, -0.0, 90.0, 200.0, 1e9, float("nan")]], device=DEVICE)
    ours = kernels.gated_activation(torch.cat((gates, torch.ones_like(gates)), dim=1), activation)
    torch.testing.assert_close(ours, FORMULAS[activation](gates), rtol=1e-6, atol=1e-25, equal_nan=True)


def test_no_rows(kernels: "TritonLayerKernels") -> None:
    x, scale = draw(0, 16, torch.float32, 0), draw(1, 8, torch.float32, 0)[0]
    half = kernels.gated_activation(x, Activation.SILU)
    assert half.shape == kernels.norm(half, scale, 1e-6).shape == (0, 8)


def test_the_kernels_are_tried(kernels: "TritonLayerKernels", monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.execute.gpu.kernels import layer

    assert layer.smoke_test(torch.device(DEVICE)) is None

    def fail(*arguments: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(layer, "_launch_norm", fail)
    assert layer.smoke_test(torch.device(DEVICE)) == "RuntimeError: no C compiler"
