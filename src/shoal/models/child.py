"""Processes that end with the one that started them, however that ends: conversions and downloads.

``python -m shoal.models.child MODULE ARGUMENTS`` runs a module as ``python -m`` does, and watches standard
input, whose other end the parent holds open: end of file there means that the parent is gone.
"""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO


def start_child(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """Start ``module`` with ``arguments``; the module itself finds its standard input empty."""
    command = [sys.executable, "-m", "shoal.models.child", module, *arguments]
    return subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
    )


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """End ``child`` if it still runs."""
    if child.poll() is None:
        child.terminate()
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _end_with_parent(watched: int) -> None:
    os.read(watched, 1)
    os._exit(1)


def main() -> None:
    """Run the module that the arguments name; ends as that does."""
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with_parent, args=(watched,), name="parent-watch", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
