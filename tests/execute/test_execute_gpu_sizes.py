"""Sizes of tiles and grids are those that Triton's own functions give."""

import pytest
from execute_builders import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 4097])
def test_sizes_are_those_of_triton(size: int) -> None:
    import triton

    from shoal.execute.gpu.kernels.sizes import cdiv, padded_width, power_of_2

    assert power_of_2(size) == triton.next_power_of_2(size)
    assert padded_width(size) == max(16, triton.next_power_of_2(size))
    assert [cdiv(size, part) for part in (1, 3, 64)] == [triton.cdiv(size, part) for part in (1, 3, 64)]
