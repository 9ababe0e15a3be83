"""Merged linear layers compute what the layers do, side by side."""

import pytest
import torch
from torch import nn

from shoal.execute.int8_linear import Int8Linear
from shoal.execute.linear import SeparateLinears
from shoal.execute.merge import Merger


def make_linears(outputs: list[int], dtype: torch.dtype) -> list[nn.Linear]:
    """Every second one has a bias."""
    torch.manual_seed(len(outputs))
    return [nn.Linear(64, n, bias=at % 2 == 0, dtype=dtype) for at, n in enumerate(outputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [[64], [64, 32, 32], [48, 17], [5, 5]])
@torch.inference_mode()
def test_dense_layers(outputs: list[int], dtype: torch.dtype) -> None:
    linears = make_linears(outputs, dtype)
    merged = Merger()(linears)
    x = torch.randn((3, 64), dtype=dtype)
    expected = torch.cat([linear(x) for linear in linears], dim=1)
    assert (merged.in_features, merged.out_features) == (64, sum(outputs))
    torch.testing.assert_close(merged(x), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("outputs", [[64], [64, 32, 32], [48, 17]])
@torch.inference_mode()
def test_int8_layers(outputs: list[int], grouped: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linears = []
    for linear in make_linears(outputs, torch.bfloat16):
        if grouped:
            values = torch.randint(-127, 128, linear.weight.shape, generator=generator).to(torch.int8)
            scales = torch.rand((len(values), 2), generator=generator)
            linears.append(Int8Linear.from_groups(values, scales, linear.bias))
        else:
            linears.append(Int8Linear.from_weight(linear.weight, linear.bias))
    merged = Merger()(linears)
    x = torch.randn((3, 64), dtype=torch.bfloat16, generator=generator)
    assert isinstance(merged, Int8Linear if all(n % 32 == 0 for n in outputs) else SeparateLinears)
    assert torch.equal(merged(x), torch.cat([linear(x) for linear in linears], dim=1))


@torch.inference_mode()
def test_layers_of_different_kinds_stay_separate() -> None:
    dense, other = make_linears([32, 32], torch.float32)
    linears = [dense, Int8Linear.from_weight(other.weight, other.bias)]
    x = torch.randn(3, 64)
    assert torch.equal(Merger()(linears)(x), torch.cat([linear(x) for linear in linears], dim=1))
