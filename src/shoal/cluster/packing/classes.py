"""Mell's size classes L, M, S and T, relative to a device group's capacity C (Mell, section VI-C)."""

from enum import IntEnum


class SizeClass(IntEnum):
    """Size class of a request."""

    BUNDLED = 0
    """At most C/8: moves only in a bundle."""
    TINY = 1
    """Over C/8, at most C/4: the paper's T."""
    SMALL = 2
    """Over C/4, at most C/3: the paper's S."""
    MEDIUM = 3
    """Over C/3, at most C/2: the paper's M."""
    LARGE = 4
    """Over C/2: the paper's L."""


def size_class(size: int, capacity: int) -> SizeClass:
    """The class of a request of ``size`` in a group of ``capacity``."""
    if 2 * size > capacity:
        return SizeClass.LARGE
    if 3 * size > capacity:
        return SizeClass.MEDIUM
    if 4 * size > capacity:
        return SizeClass.SMALL
    return SizeClass.TINY if 8 * size > capacity else SizeClass.BUNDLED
