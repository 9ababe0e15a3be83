"""Running a test once for each instruction set of this CPU."""

import pytest

from shoal.native import native_status, native_variants

_MISSING = pytest.param(None, id="none", marks=pytest.mark.skip(reason=native_status()))

each_variant = pytest.mark.parametrize(
    "native", [pytest.param(native, id=native.variant) for native in native_variants()] or [_MISSING]
)
"""Gives a test the argument ``native``, a NativeLibrary; skips it where the library is not in use."""
