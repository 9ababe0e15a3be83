"""A small copy of what an install builds from: one kernel, and the part of the package that loads it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

KERNEL = """
#include "../shoal.h"

/* How many instruction sets it was compiled for, beyond the first. */
int64_t KERNEL(shoal_level)(void) {
    int64_t level = 0;
#ifdef __AVX2__
    level++;
#endif
#ifdef __AVX512F__
    level++;
#endif
#ifdef __AVX512VNNI__
    level++;
#endif
#ifdef __AVX512BF16__
    level++;
#endif
#ifdef __AMX_BF16__
    level++;
#endif
    return level;
}
"""


def make_tree(folder: Path) -> Path:
    """Sources that are built in seconds."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("build_backend", "csrc", "src/shoal/native"):
        unwanted = shutil.ignore_patterns("__pycache__", "kernels", "libshoal.so", "build.json", ".*")
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    (folder / "src/shoal/__init__.py").write_text("")
    (folder / "csrc/kernels").mkdir()
    (folder / "csrc/kernels/level.c").write_text(KERNEL)
    return folder


def in_tree(tree: Path, program: str, **environment: str) -> str:
    """What a Python program prints that runs in ``tree`` with the build backend at hand."""
    variables = {name: value for name, value in os.environ.items() if name not in ("SHOAL_NATIVE", "CC")}
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, 'build_backend')\n{program}"],
        cwd=tree, env=variables | environment, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip


def build_info(folder: Path) -> dict[str, Any]:
    """The ``build.json`` of a build into ``folder``."""
    info: dict[str, Any] = json.loads((folder / "build.json").read_text())
    return info


def make_compiler(folder: Path, name: str, script: str = "") -> str:
    """A command that passes for a compiler of version 1.2.3, and otherwise does what ``script`` does."""
    command = folder / name
    version = 'case "$*" in *--version) echo "fake (package v4) 1.2.3"; esac'
    command.write_text(f"#!/bin/sh\n{version}\n{script}\n")
    command.chmod(0o755)
    return str(command)
