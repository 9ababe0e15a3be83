"""What Triton's interpreter lets pass and a GPU does not is noticed."""

from typing import Any

import pytest
import torch
from execute_builders import needs_triton
from strict_interpreter import strict_interpreter

from at_hand import on_cpu

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
pytestmark = [needs_triton, on_cpu]


@triton.jit
def double(x, out, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def add_up(x, out, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDTH)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < count), 0))


@triton.jit
def fill(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


def test_a_kernel_without_faults_runs() -> None:
    x, out = torch.arange(7.0), torch.zeros(7)
    with strict_interpreter():
        double[(2,)](x, out, 7, WIDTH=4)
    torch.testing.assert_close(out, 2 * x)


def test_masked_loads_are_not_0() -> None:
    out, whole = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with strict_interpreter():
        add_up[(1,)](torch.ones(3), out, 3, WIDTH=4)
        add_up[(1,)](torch.ones(3, dtype=torch.int32), whole, 3, WIDTH=4)
    assert out.isnan()
    assert whole.tolist() == [2]


@pytest.mark.parametrize("short", ["x", "out"])
def test_access_outside_of_tensors_is_an_error(short: str) -> None:
    # Of storages of their own, as a view's storage has more than the view.
    tensors = {name: torch.ones(6 if name == short else 7) for name in ("x", "out")}
    with strict_interpreter(), pytest.raises(Exception, match="outside of its tensors"):
        double[(2,)](tensors["x"], tensors["out"], 7, WIDTH=4)


def test_two_programs_writing_the_same_address_is_an_error() -> None:
    with strict_interpreter(), pytest.raises(AssertionError, match="the same address"):
        fill[(2,)](torch.zeros(1))
