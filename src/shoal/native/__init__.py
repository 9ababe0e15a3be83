"""The native library: kernels in C for CPUs, where they could be built; see ``csrc``.

Here it is found and loaded, and what is in use is said. The rooms above declare the kernels that they call.
"""

from shoal.native.library import VARIANTS, NativeLibrary, load_native, native_status, native_variants

__all__ = ["VARIANTS", "NativeLibrary", "load_native", "native_status", "native_variants"]
