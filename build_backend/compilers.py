"""Finding a C compiler: the system's own, else the one that comes with the package ``ziglang``."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ZIGLANG = "ziglang>=0.15,<0.18"
"""What pip fetches where the system has no compiler."""
CANDIDATES = ("cc", "gcc", "clang")
"""Tried in this order where ``CC`` does not name a compiler."""

X86_64_V4 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")
VNNI_BF16 = (*X86_64_V4, "-mavx512vnni", "-mavx512bf16")
VARIANTS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": X86_64_V4,
    "vnni": (*X86_64_V4, "-mavx512vnni"),
    "vnni_bf16": VNNI_BF16,
    "amx": (*VNNI_BF16, "-mamx-tile", "-mamx-bf16"),
}
"""Flags of the instruction sets, each a superset of the one before it."""

_PROBE = """
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
__m512 multiply(__m512 sums, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sums, a, b); }
__m512i multiply_bytes(__m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }
void multiply_tiles(void) { _tile_dpbf16ps(0, 1, 2); }
float root(float x) { return sqrtf(x) + expf(x); }
"""
"""Needs the newest instruction set, and the headers of the compiler and of the C library."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that can build the library."""

    command: tuple[str, ...]
    """The command with its first arguments."""
    name: str
    """For people, with the version: ``cc 12.2.0``."""
    platform: str | None = None
    """The platform tag of wheels that it builds; None is that of the system."""


class NotBuilt(Exception):
    """The library cannot be built; the message continues the words "torch only:"."""


def refuse_platform() -> None:
    """Raise NotBuilt where the library has no kernels for the system, or is switched off."""
    if is_switched_off():
        raise NotBuilt("it was installed with SHOAL_NATIVE=off")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotBuilt(f"this CPU is {platform.machine()}")
    if sys.platform != "linux":
        raise NotBuilt(f"this system is {platform.system()}")
    if sys.maxsize < 2**32:
        raise NotBuilt("this Python is one for 32 bits")


def is_switched_off() -> bool:
    """Whether ``SHOAL_NATIVE`` is ``off``; raises ValueError if it is neither that nor ``on``."""
    chosen = os.environ.get("SHOAL_NATIVE") or "on"
    if chosen not in ("on", "off"):
        raise ValueError(f"SHOAL_NATIVE={chosen} is not known; possible are on and off")
    return chosen == "off"


def compiler_requirements() -> list[str]:
    """The package that pip is to fetch for a compiler; empty where there is one, or no use for it."""
    try:
        refuse_platform()
    except NotBuilt:
        return []
    try:
        system_compiler()
    except NotBuilt as failure:
        print(f"asking for {ZIGLANG}: {failure}")
        return [ZIGLANG]
    return []


def find_compiler() -> Compiler:
    """The system's compiler, or that of ``ziglang`` if it is installed; raises NotBuilt."""
    try:
        return system_compiler()
    except NotBuilt:
        if importlib.util.find_spec("ziglang") is None:
            raise
        return zig_compiler()


def system_compiler() -> Compiler:
    """The compiler that ``CC`` names, else the first of CANDIDATES that compiles a probe; raises NotBuilt."""
    chosen = os.environ.get("CC", "").strip()
    failures = []
    for words in [chosen] if chosen else CANDIDATES:
        command = words.split()
        if shutil.which(command[0]) is None:
            continue
        try:
            _probe(command)
            return Compiler(tuple(command), f"{words} {_version(command)}")
        except NotBuilt as failure:
            failures.append(str(failure))
    if failures:
        raise NotBuilt(f"not built, because {'; '.join(failures)}")
    missing = f"there is no CC={chosen}" if chosen else "no compiler was found"
    raise NotBuilt(f"not built, because {missing}")


def zig_compiler() -> Compiler:
    """The compiler of ``ziglang``, for any x86-64 Linux of the last ten years."""
    command = (sys.executable, "-m", "ziglang")
    target = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v2", "-fno-sanitize=undefined")
    name = f"zig {_output([*command, 'version'])}"
    return Compiler((*command, "cc", *target), name, "manylinux_2_17_x86_64")


def run_compiler(command: list[str], name: str, env: dict[str, str] | None = None) -> None:
    """Run a compiler; raises NotBuilt with its first complaint, and prints all of them."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    except OSError as error:
        raise NotBuilt(f"{name} cannot be run: {error.strerror}") from error
    print(result.stderr, end="", file=sys.stderr)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        complaint = next((line for line in lines if "error" in line), lines[0] if lines else None)
        raise NotBuilt(f"{name} failed: {complaint or f'exit status {result.returncode}'}")


def _probe(command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_PROBE)
        flags = ("-std=c11", "-fPIC", "-shared", *VARIANTS["amx"])
        output = str(source.with_suffix(".so"))
        run_compiler([*command, *flags, str(source), "-lm", "-o", output], " ".join(command))


def _version(command: list[str]) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)*", _output([*command, "--version"]))
    return found.group() if found else "of unknown version"


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.strip()
