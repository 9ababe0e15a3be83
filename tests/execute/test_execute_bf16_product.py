"""Linear layers in bfloat16: the sums of the definition, and rows that depend on nothing else."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from native_variants import each_variant
from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.native_product import Activation, NativeProduct
from shoal.execute.linear.packed_weights import PackedWeights, pack_bf16
from shoal.native import NativeLibrary, native_variants

DENSE_ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}


def make_layer(
    outputs: int, inputs: int, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, PackedWeights]:
    weight = torch.randn(outputs, inputs).bfloat16()
    added = torch.randn(outputs).bfloat16() if bias else None
    return weight, added, pack_bf16(weight, added, HugePages())


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_near(result: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Within the rounding of the result, and of float32 sums of terms of that ``size``."""
    rounding = expected.abs() * 2.0**-8 if result.dtype == torch.bfloat16 else 0
    assert ((result.double() - expected).abs() <= rounding + 2e-5 * size + 1e-30).all()


@each_variant
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 100),
    outputs=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(200))
def test_merged_layers_match_the_definition(
    native: NativeLibrary, rows: int, inputs: int, outputs: list[int], bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layers = [make_layer(count, inputs, bias=bias) for count in outputs]
    x = torch.randn(rows, inputs).bfloat16()
    product = NativeProduct(native, [weights for _, _, weights in layers])
    expected = torch.cat([exact(x, weight, added) for weight, added, _ in layers], dim=1)
    size = torch.cat(
        [F.linear(x.double().abs(), weight.double().abs()) + 3 for weight, _, _ in layers], dim=1
    )
    assert_near(product(x), expected, size)


@each_variant
@pytest.mark.parametrize("activation", DENSE_ACTIVATIONS)
def test_a_gate_is_not_rounded_before_its_activation(native: NativeLibrary, activation: Activation) -> None:
    torch.manual_seed(1)
    gate, factor = make_layer(70, 64, bias=True), make_layer(70, 64, bias=False)
    x = torch.randn(23, 64).bfloat16()
    product = NativeProduct(native, [gate[2], factor[2]], activation)
    gates, factors = exact(x, *gate[:2]), exact(x, *factor[:2])
    size = (64 + gates.abs()) * (1 + factors.abs())
    assert_near(product(x), DENSE_ACTIVATIONS[activation](gates) * factors, size)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@each_variant
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(native: NativeLibrary) -> None:
    torch.manual_seed(2)
    x = torch.randn(150, 200).bfloat16()
    product = NativeProduct(native, [make_layer(300, 200, bias=True)[2]])
    expected = torch.cat([product(row[None]) for row in x])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in (2, 11, 12, 13, 16, 17, 32, 33, 97, 129, 150):
            parts = [product(part) for part in x.split(rows)]
            assert torch.equal(torch.cat(parts), expected)


@each_variant
def test_values_that_are_not_finite_affect_only_their_row(native: NativeLibrary) -> None:
    product = NativeProduct(native, [make_layer(40, 64, bias=False)[2]])
    x = torch.randn(3, 64).bfloat16()
    expected = product(x)
    x[1, 5] = torch.nan
    result = product(x)
    assert not result[1].isfinite().any()
    assert torch.equal(result[::2], expected[::2])


def test_instruction_sets_with_float32_products_give_the_same_bits() -> None:
    torch.manual_seed(3)
    weights, x = make_layer(40, 70, bias=True)[2], torch.randn(20, 70).bfloat16()
    rounding = ("vnni_bf16", "amx")
    widening = [native for native in native_variants() if native.variant not in rounding]
    results = [NativeProduct(native, [weights])(x) for native in widening]
    assert all(torch.equal(result, results[0]) for result in results)
