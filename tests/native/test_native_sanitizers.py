"""The programs in csrc/tests run kernels under sanitizers, on buffers that must not be overrun.

A program includes the kernels that it tests; other functions that these call come from the built library.
"""

import subprocess
from functools import cache
from pathlib import Path

import pytest
from compile import FLAGS, SOURCES, TARGET
from compilers import VARIANTS, NotBuilt, system_compiler

from native_variants import each_variant
from shoal.native import NativeLibrary

LIBRARY = TARGET / "libshoal.so"
PROGRAMS = sorted((SOURCES / "tests").glob("*.c"))
SANITIZED = (
    "-std=gnu11",  # the programs, unlike the library, need mmap
    *("-O1", "-g", "-fno-var-tracking"),  # less to wait for; reports name lines without following variables
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


@cache
def compiler() -> tuple[str, ...]:
    """A compiler with sanitizers; skips the test without."""
    try:
        command = system_compiler().command
    except NotBuilt as reason:
        pytest.skip(str(reason))
    result = subprocess.run(
        [*command, *SANITIZED, "-x", "c", "-", "-o", "/dev/null"],
        input="int main(void) { return 0; }\n", capture_output=True, text=True,
    )  # fmt: skip
    if result.returncode:
        pytest.skip(f"{' '.join(command)} has no sanitizers: {result.stderr}")
    return command


def compile_with(variant: str, *arguments: str | Path) -> None:
    flags = (*FLAGS, *SANITIZED, *VARIANTS[variant], f"-DSHOAL_VARIANT={variant}")
    subprocess.run([*compiler(), *flags, *arguments], check=True)


def run(program: Path) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for with ptrace, which containers may forbid.
    return subprocess.run(
        [str(program)], env={"ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@each_variant
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_kernels_stay_inside_their_buffers(program: Path, native: NativeLibrary, tmp_path: Path) -> None:
    target = tmp_path / program.stem
    libraries = (LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-lm", "-pthread")
    compile_with(native.variant, program, *libraries, "-o", target)
    result = run(target)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("return guarded_floats(5, 1)[5] > 2;", "SEGV"),
        ("char *bytes = calloc((size_t)argc, 1); return bytes[argc];", "heap-buffer-overflow"),
        ("volatile int most = INT32_MAX; return most + argc == 5;", "signed integer overflow"),
        ("CHECK(argc == 0);", "argc == 0 does not hold"),
    ],
    ids=["guard", "address", "undefined", "check"],
)
def test_the_sanitizers_find_mistakes(mistake: str, complaint: str, tmp_path: Path) -> None:
    program = tmp_path / "mistake.c"
    head = f'#include "{SOURCES}/tests/guard.h"\n'
    program.write_text(head + f"int main(int argc, char **argv) {{ (void)argv; {mistake} return 0; }}\n")
    compile_with("scalar", program, "-o", tmp_path / "mistake")
    result = run(tmp_path / "mistake")
    assert result.returncode != 0
    assert complaint in result.stderr
