"""Linear layers with weights in four bits: the bits of the same weights in int8, in half of the memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.execute.linear.native_product import Activation
from shoal.execute.linear.packed_linear import PackedLinear, joint_product, packed_product
from shoal.execute.linear.packed_weights import (
    PackedWeights,
    pack_int8,
    pack_integers,
    quantise_channels,
    unpack_int8,
    widened,
)
from shoal.native import NativeLibrary, load_native, native_variants


def ways() -> list[NativeLibrary | None]:
    """None, which is torch, and every instruction set that this CPU has."""
    return [None, *native_variants()]


def random_weights(
    generator: np.random.Generator, outputs: int, inputs: int, *, grouped: bool = True, bias: bool = False
) -> tuple[PackedWeights, PackedWeights]:
    """The same weights in four bits and in int8; some inputs have an extreme in all outputs."""
    values = generator.integers(-8, 8, (outputs, inputs)).astype(np.int8)
    values[:, generator.random(inputs) < 0.2] = generator.choice([-8, 7, 0])
    scales = generator.random((outputs, -(-inputs // 32)) if grouped else outputs).astype(np.float32)
    biases = torch.from_numpy(generator.normal(size=outputs).astype(np.float32)) if bias else None
    arguments = torch.from_numpy(values), torch.from_numpy(scales), biases
    return pack_integers(*arguments), pack_int8(*arguments)


def random_rows(generator: np.random.Generator, rows: int, inputs: int) -> torch.Tensor:
    """Rows of many magnitudes, some of equal values, which make the largest sums."""
    x = generator.normal(size=(rows, inputs)) * 10.0 ** generator.integers(-6, 6, (rows, 1))
    x[generator.random(rows) < 0.3] = generator.choice([-3.7, 3.7, 0])
    return torch.from_numpy(x.astype(np.float32))


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 100),
    st.integers(1, 200),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_every_instruction_set_gives_the_bits_of_int8(
    seed: int, outputs: int, inputs: int, rows: int, grouped: bool, bias: bool
) -> None:
    generator = np.random.default_rng(seed)
    narrow, wide = random_weights(generator, outputs, inputs, grouped=grouped, bias=bias)
    assert (narrow.bits, wide.bits) == (4, 8)
    x = random_rows(generator, rows, inputs)
    expected = packed_product([wide], None)(x)
    for native in ways():
        assert torch.equal(packed_product([narrow], native)(x), expected), native and native.variant


@pytest.mark.parametrize("extreme", [-8, 7])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_saturate(extreme: int, sign: int) -> None:
    inputs = 96
    values = torch.full((40, inputs), extreme, dtype=torch.int8)
    weights = pack_integers(values, torch.ones(40, inputs // 32))
    x = torch.full((9, inputs), 127.0 * sign)
    for native in ways():
        assert (packed_product([weights], native)(x) == inputs * 127.0 * sign * extreme).all()


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    generator = np.random.default_rng(3)
    narrow, _ = random_weights(generator, 600, 300)
    x = random_rows(generator, 211, 300)
    threads = torch.get_num_threads()
    for native in native_variants():
        product = packed_product([narrow], native)
        together = product(x)
        for size in (1, 2, 5, 6, 7, 11, 12, 13, 100):
            assert torch.equal(torch.cat([product(part) for part in x.split(size)]), together), size
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(product(x), together), count
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_one_input_become_one_product(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(4)
    pairs = [random_weights(generator, outputs, 100, bias=outputs == 70) for outputs in (70, 70, 33)]
    x = random_rows(generator, 23, 100).to(dtype)
    expected = packed_product([wide for _, wide in pairs], None)(x)
    gated = packed_product([wide for _, wide in pairs[:2]], None, Activation.SILU)(x)
    for native in ways():
        layers = [PackedLinear(narrow, native) for narrow, _ in pairs]
        product, gate = joint_product(layers), joint_product(layers[:2], Activation.SILU)
        assert product is not None
        assert gate is not None
        assert torch.equal(product(x), expected)
        assert torch.equal(gate(x), gated)
        assert joint_product([*layers[:2], PackedLinear(pairs[2][1], native)]) is None


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 65), (100, 31)])
def test_packing_is_lossless_and_takes_half_the_bytes(shape: tuple[int, int]) -> None:
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    narrow, wide = (pack(values, torch.ones(shape[0])) for pack in (pack_integers, pack_int8))
    assert torch.equal(unpack_int8(narrow), unpack_int8(wide))
    assert torch.equal(widened(narrow).packed, wide.packed)
    assert 2 * narrow.packed.nbytes == wide.packed.nbytes


@pytest.mark.parametrize("outlier", [-9, 8, 127, -128])
def test_a_value_that_needs_more_bits_keeps_all_in_int8(outlier: int) -> None:
    values = torch.zeros((3, 40), dtype=torch.int8)
    values[2, 39] = outlier
    assert pack_integers(values, torch.ones(3)).bits == 8


def test_layers_quantised_here_are_in_int8() -> None:
    linear = PackedLinear(pack_integers(*quantise_channels(torch.randn(10, 40))), load_native())
    assert linear.weights.bits == 8
