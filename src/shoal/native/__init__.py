"""The native library: kernels in C for CPUs, where they could be built; see ``csrc``."""

from shoal.native.library import NativeLibrary, load_native

__all__ = ["NativeLibrary", "load_native"]
