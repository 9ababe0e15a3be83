"""The native library of C kernels for CPUs (see ``csrc``); callers declare the kernels that they use."""

from shoal.native.library import VARIANTS, NativeLibrary, load_native, native_status, native_variants

__all__ = ["VARIANTS", "NativeLibrary", "load_native", "native_status", "native_variants"]
