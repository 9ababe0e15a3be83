"""int8 linear layers: every instruction set, and torch alone, give the bits of the definition."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_builders import quantised_linear
from torch import nn

from shoal.execute.linear.int8_reference import ACTIVATIONS, multiply_add
from shoal.execute.linear.native_product import Activation
from shoal.execute.linear.packed_linear import PackedLinear, packed_product
from shoal.execute.linear.packed_weights import pack_int8, quantise_channels, unpack_int8
from shoal.native import NativeLibrary, load_native, native_variants


def ways() -> list[NativeLibrary | None]:
    """None, which is torch, and every instruction set that this CPU has."""
    return [None, *native_variants()]


def by_definition(
    x: np.ndarray, values: np.ndarray, scales: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """The layer's definition, in exact integers and single roundings to float32."""
    exact = np.longdouble  # holds the product of two float32, and rounds their sum far below float32
    outputs, inputs = values.shape
    groups = -(-inputs // 32)
    x = np.pad(x, ((0, 0), (0, groups * 32 - inputs)))
    values = np.pad(values.astype(np.int64), ((0, 0), (0, groups * 32 - inputs)))
    total = np.zeros((len(x), outputs), np.float32)
    for group in range(groups):
        part = slice(group * 32, group * 32 + 32)
        largest = np.abs(x[:, part]).max(axis=1, keepdims=True)
        factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 2.0**-100)
        integers = np.rint(x[:, part] * factor).astype(np.int64)
        scale = np.where(factor > 0, largest * (np.float32(1) / np.float32(127)), np.float32(0))
        sums = (integers @ values[:, part].T).astype(np.float32)
        if scales.ndim == 2:
            sums = sums * scales[:, group]
        total = (sums.astype(exact) * scale.astype(exact) + total.astype(exact)).astype(np.float32)
    if scales.ndim == 1:
        total = total * scales
    return total if bias is None else total + bias


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def random_layer(
    generator: np.random.Generator, outputs: int, inputs: int, *, grouped: bool, bias: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values, scales and bias; the values with all extremes."""
    values = generator.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    values[:, generator.random(inputs) < 0.1] = generator.choice([-128, 127, 0])
    scales = generator.random((outputs, -(-inputs // 32)) if grouped else outputs).astype(np.float32)
    return values, scales, generator.normal(size=outputs).astype(np.float32) if bias else None


def random_rows(generator: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Rows of many magnitudes, some with zeros, equal values, or values too small to be scaled."""
    x = generator.normal(size=(rows, inputs)) * 10.0 ** generator.integers(-6, 6, (rows, 1))
    kinds = generator.integers(0, 8, rows)
    x[kinds == 0] = 0
    x[kinds == 1] = 3.7
    x[kinds == 2] *= 1e-36
    x[kinds == 3, : inputs // 2] = -5
    return x.astype(np.float32)


def make_linear(
    values: np.ndarray, scales: np.ndarray, bias: np.ndarray | None, native: NativeLibrary | None
) -> PackedLinear:
    return PackedLinear(
        pack_int8(*(None if a is None else torch.from_numpy(a) for a in (values, scales, bias))), native
    )


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 100),
    st.integers(1, 200),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_every_instruction_set_gives_the_bits_of_the_definition(
    seed: int, outputs: int, inputs: int, rows: int, grouped: bool, bias: bool
) -> None:
    generator = np.random.default_rng(seed)
    layer = random_layer(generator, outputs, inputs, grouped=grouped, bias=bias)
    x = random_rows(generator, rows, inputs)
    expected = torch.from_numpy(by_definition(x, *layer))
    for native in ways():
        assert same_bits(make_linear(*layer, native)(torch.from_numpy(x)), expected), (
            native and native.variant
        )


@pytest.mark.parametrize("grouped", [False, True])
def test_a_large_layer_gives_the_bits_of_the_definition(grouped: bool) -> None:
    generator = np.random.default_rng(1)
    layer = random_layer(generator, 700, 1536, grouped=grouped, bias=True)
    x = random_rows(generator, 130, 1536)
    expected = torch.from_numpy(by_definition(x, *layer))
    for native in ways():
        assert same_bits(make_linear(*layer, native)(torch.from_numpy(x)), expected), (
            native and native.variant
        )


@pytest.mark.parametrize("extreme", [-128, -127, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_saturate(extreme: int, sign: int) -> None:
    inputs = 96
    values = torch.full((40, inputs), extreme, dtype=torch.int8)
    layer = PackedLinear(pack_int8(values, torch.ones(40, inputs // 32)), load_native())
    x = torch.full((9, inputs), 127.0 * sign)
    assert (layer(x) == inputs * 127.0 * sign * extreme).all()


@pytest.mark.parametrize("grouped", [False, True])
def test_bfloat16_is_the_float32_result_rounded(grouped: bool) -> None:
    generator = np.random.default_rng(2)
    layer = random_layer(generator, 70, 100, grouped=grouped, bias=True)
    x = torch.from_numpy(random_rows(generator, 50, 100)).bfloat16()
    for native in ways():
        linear = make_linear(*layer, native)
        assert torch.equal(linear(x), linear(x.float()).bfloat16())


@pytest.mark.parametrize("native", ways(), ids=lambda native: native.variant if native else "torch")
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(native: NativeLibrary | None) -> None:
    generator = np.random.default_rng(3)
    linear = make_linear(*random_layer(generator, 600, 300, grouped=False, bias=True), native)
    x = torch.from_numpy(random_rows(generator, 211, 300))
    together = linear(x)
    for size in (1, 2, 5, 6, 7, 64, 96, 100):
        assert same_bits(torch.cat([linear(part) for part in x.split(size)]), together), size
    shuffled = torch.randperm(211, generator=torch.Generator().manual_seed(0))
    assert same_bits(linear(x[shuffled]), together[shuffled])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert same_bits(linear(x), together), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_affects_no_other(broken: float) -> None:
    generator = np.random.default_rng(4)
    layer = random_layer(generator, 64, 70, grouped=False, bias=False)
    x = torch.from_numpy(random_rows(generator, 12, 70))
    for native in ways():
        linear = make_linear(*layer, native)
        expected = linear(x)
        spoilt = x.clone()
        spoilt[5, 69] = broken
        result = linear(spoilt)
        assert result[5].isnan().all()
        kept = torch.arange(12) != 5
        assert same_bits(result[kept], expected[kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_layers_give_the_bits_of_separate_ones(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(5)
    layers = [
        make_linear(*random_layer(generator, outputs, 100, grouped=grouped, bias=bias), None)
        for outputs, grouped, bias in (
            (70, False, True),
            (1, True, False),
            (33, True, True),
            (64, False, False),
        )
    ]
    x = torch.from_numpy(random_rows(generator, 23, 100)).to(dtype)
    expected = torch.cat([layer(x.float()) for layer in layers], dim=1)
    for native in ways():
        together = packed_product([layer.weights for layer in layers], native)
        assert torch.equal(together(x), expected.to(dtype))


DENSE_ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU_ERF: F.gelu,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", DENSE_ACTIVATIONS)
def test_a_gated_pair_has_one_rounding_and_the_same_bits_everywhere(
    activation: Activation, dtype: torch.dtype
) -> None:
    generator = np.random.default_rng(6)
    gate, factor = (
        make_linear(*random_layer(generator, 70, 64, grouped=False, bias=bias), None)
        for bias in (True, False)
    )
    x = torch.from_numpy(random_rows(generator, 23, 64)).to(dtype)
    x[:8] *= 0.01  # gates near 0
    gates, factors = gate(x.float()), factor(x.float())
    expected = DENSE_ACTIVATIONS[activation](gates) * factors
    pair = [gate.weights, factor.weights]
    results = [packed_product(pair, native, activation)(x) for native in ways()]
    for result in results:
        assert torch.equal(result, results[0])
        rounding = expected.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23)
        assert (
            (result.float() - expected).abs() <= rounding + 1e-6 * gates.abs().clamp(min=1) * factors.abs()
        ).all()


@pytest.mark.parametrize("activation", DENSE_ACTIVATIONS)
def test_activations_are_exact_to_seven_digits(activation: Activation) -> None:
    x = torch.cat(
        [torch.linspace(-30, 30, 100_001), torch.tensor([-1e20, -1e5, -88.0, 0.0, 88.0, 1e5, 1e20])]
    )
    expected = DENSE_ACTIVATIONS[activation](x.double())
    error = (ACTIVATIONS[activation](x).double() - expected).abs()
    assert (error <= 3e-7 * x.abs().clamp(min=1)).all()


def test_any_leading_dimensions_and_strides() -> None:
    linear = quantised_linear(torch.randn(10, 40))
    x = torch.randn(40, 2, 3).permute(1, 2, 0)
    assert torch.equal(linear(x), linear(x.reshape(6, 40)).view(2, 3, 10))


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 65), (100, 31)])
def test_packing_is_lossless(shape: tuple[int, int]) -> None:
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    assert torch.equal(unpack_int8(pack_int8(values, torch.ones(shape[0])))[: shape[0], : shape[1]], values)


def test_weights_are_rounded_to_the_nearest_of_255_steps() -> None:
    weight = torch.randn(50, 300)
    weight[7] = 0
    values, scales = quantise_channels(weight)
    assert values.abs().amax(dim=1).tolist() == [127] * 7 + [0] + [127] * 42
    assert ((values * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_quantised_layer_is_close_to_the_dense_one(bias: bool) -> None:
    torch.manual_seed(5)
    dense = nn.Linear(576, 200, bias=bias)
    x = torch.randn(30, 576)
    quantised = quantised_linear(dense.weight, dense.bias)
    expected = dense(x)
    assert (quantised(x) - expected).norm() < 0.012 * expected.norm()


def test_the_emulated_multiply_add_rounds_once() -> None:
    generator = torch.Generator().manual_seed(6)
    a, b, c = (torch.randn(3000, generator=generator) for _ in range(3))
    c[:1000] *= 2.0**30
    # Sums that lie next to the middle between two float32, where rounding twice goes wrong.
    step = 2.0**-24
    a[1000:1200], b[1000:1200] = 2.0**-20, 2.0**-60
    c[1000:1200] = 1.0
    middle = torch.tensor([1 + 2 * step, 1 + step * 4, -1 - 2 * step, 1.0])
    a[1200:1204], b[1200:1204], c[1200:1204] = step * (1 + 2.0**-20), middle.sign(), middle
    a[1204:1208], b[1204:1208], c[1204:1208] = step * (1 - 2.0**-23), middle.sign(), middle
    got = multiply_add(a, b, c)
    for x, y, z, sum_ in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        neighbours = np.nextafter(np.float32(sum_), np.float32([-np.inf, np.inf]))
        error = abs(Fraction(sum_) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in neighbours)
