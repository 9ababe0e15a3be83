"""Compiling the native library: ``python build_backend/compile.py [--cc "zig cc"]`` puts it into the sources."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
TARGET = ROOT / "src" / "shoal" / "native"
LIBRARY, INFO = "libshoal.so", "build.json"

FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-fvisibility=default",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
VARIANTS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
VARIANTS["vnni"] = (*VARIANTS["avx512"], "-mavx512vnni")
VARIANTS["vnni_bf16"] = (*VARIANTS["vnni"], "-mavx512bf16")
"""Instruction sets, each a superset of the one before; every file of csrc/kernels is compiled for each."""


def compile_library(compiler: list[str], target: Path) -> None:
    """Compile all of csrc into ``target``; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        jobs = [(SOURCES / "runtime.c", "runtime.o", ())]
        for kernel in sorted((SOURCES / "kernels").glob("*.c")):
            for variant, flags in VARIANTS.items():
                jobs.append((kernel, f"{kernel.stem}_{variant}.o", (f"-DSHOAL_VARIANT={variant}", *flags)))
        for source, name, flags in jobs:
            objects.append(str(Path(folder) / name))
            run([*compiler, *FLAGS, *flags, "-c", str(source), "-o", objects[-1]])
        target.mkdir(parents=True, exist_ok=True)
        partial = target / f".{LIBRARY}.partial"
        run([*compiler, "-shared", *objects, "-lm", "-o", str(partial)])
        partial.replace(target / LIBRARY)
    (target / INFO).write_text(
        json.dumps({"compiler": " ".join(compiler), "variants": list(VARIANTS)}) + "\n"
    )


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", default="cc", help="the compiler and its first arguments")
    try:
        compile_library(shlex.split(parser.parse_args().cc), TARGET)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
