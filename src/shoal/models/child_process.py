"""Child processes that end when their parent ends, even if it is killed."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

_PARENT_CHECK_S = 1.0


def start_child(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` with ``arguments`` and empty standard input."""
    command = [sys.executable, "-m", "shoal.models.run_child", module, *arguments]
    return subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
    )


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """Terminate ``child`` if it still runs."""
    if child.poll() is None:
        child.terminate()
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def end_with_parent(lifeline: int) -> None:
    """From now on, exit this process as soon as its parent has ended or closed its end of ``lifeline``.

    lifeline: file descriptor of a pipe whose other end only the parent holds, and never writes to.
    """
    arguments = (lifeline, os.getppid())
    threading.Thread(target=_watch, args=arguments, name="parent-watch", daemon=True).start()


def _watch(lifeline: int, parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([lifeline], [], [], _PARENT_CHECK_S)
        try:
            if readable and not os.read(lifeline, 1):
                break
        except ConnectionError:  # the parent ended with unread data
            break
    os._exit(1)
