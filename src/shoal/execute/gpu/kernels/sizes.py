"""Sizes of tiles and grids, on the host.

Triton has functions for them, too, which take microseconds each: as long as half a launch.
"""


def cdiv(size: int, part: int) -> int:
    """Number of parts that a size has, the last one perhaps smaller."""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """The least power of two that is at least ``size``, which is positive."""
    return 1 << (size - 1).bit_length()


def padded_width(dim: int) -> int:
    """Elements of a tile's row for keys, values or queries of this size."""
    return max(16, power_of_2(dim))
