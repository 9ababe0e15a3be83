"""The programs in csrc/tests run every kernel under sanitizers, on buffers that must not be overrun."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from compile import FLAGS, SOURCES
from compilers import VARIANTS, NotBuilt, system_compiler

from native_variants import each_variant
from shoal.native import NativeLibrary

PROGRAMS = sorted((SOURCES / "tests").glob("*.c"))
# -std=gnu11: the programs, unlike the library, need mmap. -O1: less to wait for.
SANITIZED = ("-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


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
    if result.returncode or shutil.which("ar") is None:
        pytest.skip(f"{' '.join(command)} has no sanitizers, or there is no ar: {result.stderr}")
    return command


def compile_with(variant: str, *arguments: str | Path) -> None:
    flags = (*FLAGS, *SANITIZED, *VARIANTS[variant], f"-DSHOAL_VARIANT={variant}")
    subprocess.run([*compiler(), *flags, *arguments], check=True)


@cache
def kernels(variant: str, folder: Path) -> Path:
    """All kernels as an archive: of what a program has included itself, the linker takes nothing."""
    folder = folder / variant
    folder.mkdir()
    sources = [SOURCES / "runtime.c", *sorted((SOURCES / "kernels").glob("*.c"))]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda *names: compile_with(variant, "-c", "-o", *names), objects, sources))
    archive = folder / "kernels.a"
    subprocess.run(["ar", "rcs", archive, *objects], check=True)
    return archive


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For objects and programs."""
    return tmp_path_factory.mktemp("sanitized")


def run(program: Path) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for with ptrace, which containers may forbid.
    return subprocess.run(
        [str(program)], env={"ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@each_variant
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_kernels_keep_to_their_buffers(
    program: Path, native: NativeLibrary, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / program.stem
    compile_with(native.variant, program, kernels(native.variant, folder), "-lm", "-o", target)
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
def test_mistakes_are_found(mistake: str, complaint: str, tmp_path: Path) -> None:
    program = tmp_path / "mistake.c"
    head = f'#include "{SOURCES}/tests/guard.h"\n'
    program.write_text(head + f"int main(int argc, char **argv) {{ (void)argv; {mistake} return 0; }}\n")
    compile_with("scalar", program, "-o", tmp_path / "mistake")
    result = run(tmp_path / "mistake")
    assert result.returncode != 0
    assert complaint in result.stderr
