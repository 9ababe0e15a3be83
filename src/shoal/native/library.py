"""Loading the native library and choosing its kernels by what the CPU can do."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

VARIANTS = ("scalar", "avx2", "avx512", "vnni", "vnni_bf16")
"""Instruction sets, each a superset of the one before it."""
_FILE = Path(__file__).parent / "libshoal.so"
_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


class NativeLibrary:
    """The loaded library; its kernels of one instruction set."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self._library = library
        self.variant = variant
        """The instruction set in use, one of VARIANTS."""

    def kernel(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """The function ``name`` for the instruction set in use, with its argument types."""
        function = self._library[f"{name}_{self.variant}"]
        function.argtypes, function.restype = arguments, result
        return function


@cache
def load_native() -> NativeLibrary | None:
    """The library, or None where it was not built, is switched off, or does not run here.

    ``SHOAL_NATIVE=off`` switches it off, ``SHOAL_ISA`` chooses a smaller instruction set.
    """
    if os.environ.get("SHOAL_NATIVE") == "off" or not _FILE.exists():
        return None
    library, shim = ctypes.CDLL(str(_FILE)), ctypes.CDLL(str(_TORCH))
    functions = (shim.torch_parallel_for, shim.torch_get_num_threads)
    library.shoal_use_threads(*[ctypes.cast(function, ctypes.c_void_p) for function in functions])
    library.shoal_cpu_features.restype = ctypes.c_int64
    features = library.shoal_cpu_features()
    best = next(number for number in range(len(VARIANTS)) if not features >> number & 1)
    chosen = os.environ.get("SHOAL_ISA")
    return NativeLibrary(library, VARIANTS[best] if chosen is None else chosen)
