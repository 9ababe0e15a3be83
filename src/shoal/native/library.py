"""Loading the native library, choosing kernels by the CPU's instruction set, and reporting what is used."""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from shoal.core import ConfigError
from shoal.native.sources import digest

VARIANTS = ("scalar", "avx2", "avx512", "vnni", "vnni_bf16", "amx")
"""Instruction sets, each a superset of the one before it."""
_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER.parents[2] / "csrc"


class NativeLibrary:
    """The kernels of the loaded library for one instruction set."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self._library = library
        self.variant = variant
        """The instruction set in use, one of VARIANTS."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what ``load_native`` returns where it is unpickled."""
        return load_native, ()

    def kernel(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """The function ``name`` for the instruction set in use; arguments, result: its C types."""
        function = self._library[f"{name}_{self.variant}"]
        function.argtypes, function.restype = arguments, result
        return function

    def address(self, name: str) -> int:
        """Address of the function ``name``, for native code that calls it."""
        return ctypes.cast(self._library[f"{name}_{self.variant}"], ctypes.c_void_p).value or 0


class _NotInUse(Exception):
    """Why the library is not in use; follows "torch only:" in the status."""


@cache
def load_native() -> NativeLibrary | None:
    """The library; None if it was not built, is switched off or does not run (see ``native_status``).

    ``SHOAL_NATIVE=off`` switches it off, ``SHOAL_ISA`` chooses a smaller instruction set. Imports torch,
    whose number of threads the library uses. Raises ConfigError for an invalid value of a variable.
    """
    try:
        library = _open()
        _follow_torch_threads(library)
    except _NotInUse:
        return None
    return NativeLibrary(library, _chosen_variant(library))


def native_variants() -> tuple[NativeLibrary, ...]:
    """The library for each instruction set of this CPU, smallest first; empty if it is not in use."""
    chosen = load_native()
    if chosen is None:
        return ()
    return tuple(NativeLibrary(chosen._library, variant) for variant in _supported(chosen._library))


def native_status() -> str:
    """A line for users: native kernels and their instruction set, or torch only and why.

    Does not import torch. Raises ConfigError as ``load_native`` does.
    """
    try:
        library = _open()
        if "torch" in sys.modules:
            _follow_torch_threads(library)
    except _NotInUse as reason:
        return f"torch only: {reason}"
    return f"native kernels ({_chosen_variant(library)}, built by {_build_info()['compiler']})"


def _open() -> ctypes.CDLL:
    """Open the library, without threads yet; raises _NotInUse."""
    chosen = os.environ.get("SHOAL_NATIVE") or "on"
    if chosen not in ("on", "off"):
        raise ConfigError(f"SHOAL_NATIVE={chosen} is not known; possible are on and off")
    if chosen == "off":
        raise _NotInUse("SHOAL_NATIVE=off")
    info = _build_info()
    if "reason" in info:
        raise _NotInUse(info["reason"])
    if _SOURCES.is_dir() and info.get("sources") != digest(_SOURCES):
        raise _NotInUse("the library was built from other sources than those in csrc; install again")
    try:
        library = ctypes.CDLL(str(_FOLDER / "libshoal.so"))
        library.shoal_cpu_features.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise _NotInUse(f"the library cannot be loaded: {error}") from error
    return library


def _build_info() -> dict[str, str]:
    """build.json: ``compiler`` and ``sources``, or the ``reason`` why there is no library."""
    try:
        info: dict[str, str] = json.loads((_FOLDER / "build.json").read_text(encoding="utf-8"))
        return info
    except (OSError, ValueError):
        return {"reason": "not built; installing Shoal builds it"}


def _follow_torch_threads(library: ctypes.CDLL) -> None:
    """Let the library use torch's number of threads; raises _NotInUse."""
    import torch

    try:
        shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.shoal_use_threads(ctypes.cast(shim.torch_get_num_threads, ctypes.c_void_p))
    except (OSError, AttributeError) as error:
        raise _NotInUse(f"torch does not tell its number of threads: {error}") from error


def _supported(library: ctypes.CDLL) -> tuple[str, ...]:
    """Instruction sets of this CPU; bit n of its features is for VARIANTS[n + 1]."""
    features = library.shoal_cpu_features()
    best = next(number for number in range(len(VARIANTS)) if not features >> number & 1)
    return VARIANTS[: best + 1]


def _chosen_variant(library: ctypes.CDLL) -> str:
    supported = _supported(library)
    chosen = os.environ.get("SHOAL_ISA") or supported[-1]
    if chosen in supported:
        return chosen
    what = "is not an instruction set of this CPU" if chosen in VARIANTS else "is not known"
    raise ConfigError(f"SHOAL_ISA={chosen} {what}; possible here are {', '.join(supported)}")
