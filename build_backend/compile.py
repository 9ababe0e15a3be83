"""Compiling the native library; ``python build_backend/compile.py [--cc gcc-14]`` puts it into src."""

import argparse
import json
import os
import runpy
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compilers import VARIANTS, Compiler, NotBuilt, find_compiler, refuse_platform, run_compiler

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
TARGET = ROOT / "src" / "shoal" / "native"
LIBRARY, INFO = "libshoal.so", "build.json"

FLAGS = (
    "-std=c11",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=default",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)


def build_library(target: Path) -> str | None:
    """Build the library into the folder ``target``, or say why not: in its ``build.json``, and returned."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        refuse_platform()
        compiler = find_compiler()
        print(f"compiling the native library with {compiler.name}")
        try:
            compile_library(compiler, target / LIBRARY)
        except NotBuilt as failure:
            raise NotBuilt(f"not built, because {failure}") from failure
        info = {"compiler": compiler.name, "platform": compiler.platform, "sources": _digest()}
    except NotBuilt as failure:
        print(f"there will be no native library: {failure}", file=sys.stderr)
        (target / LIBRARY).unlink(missing_ok=True)
        info = {"reason": str(failure)}
    (target / INFO).write_text(json.dumps(info) + "\n", encoding="utf-8")
    return info.get("reason")


def compile_library(compiler: Compiler, library: Path) -> None:
    """Compile all of csrc into the file ``library``, which is replaced at the end; raises NotBuilt."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {f"ZIG_{name}_CACHE_DIR": f"{folder}/zig" for name in ("GLOBAL", "LOCAL")}
        env = {**os.environ, **caches}
        commands = []
        for source, name, flags in _objects():
            commands.append([*compiler.command, *FLAGS, *flags, "-c", str(source), "-o", f"{folder}/{name}"])
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda command: run_compiler(command, compiler.name, env), commands))
        partial = library.with_name(f".{library.name}.partial")
        objects = [command[-1] for command in commands]
        link = [*compiler.command, "-shared", *objects, "-lm", "-pthread", "-o", str(partial)]
        run_compiler(link, compiler.name, env)
        partial.replace(library)


def _objects() -> list[tuple[Path, str, tuple[str, ...]]]:
    """Source, object and flags: every kernel once for each instruction set."""
    objects: list[tuple[Path, str, tuple[str, ...]]]
    objects = [(source, f"{source.stem}.o", ()) for source in sorted(SOURCES.glob("*.c"))]
    for kernel in sorted((SOURCES / "kernels").glob("*.c")):
        for variant, flags in VARIANTS.items():
            objects.append((kernel, f"{kernel.stem}_{variant}.o", (f"-DSHOAL_VARIANT={variant}", *flags)))
    return objects


def _digest() -> str:
    """As the package computes it, without importing the package."""
    return runpy.run_path(str(TARGET / "sources.py"))["digest"](SOURCES)


def main() -> None:
    """Build the library into the sources, with the compiler that is named or found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", help="the compiler and its first arguments; otherwise CC, or what is found")
    chosen = parser.parse_args().cc
    if chosen:
        os.environ["CC"] = chosen
    sys.exit(1 if build_library(TARGET) else 0)


if __name__ == "__main__":
    main()
