"""Starts the node process, early if possible, to overlap imports with the start of the server.

Importing an engine's libraries takes seconds. A node that is started early lets a first engine do that while
the server reads its options and finds its models.
"""

import os
import subprocess
import sys
from contextlib import suppress

from shoal.engine.process.child_signals import interrupts_held_back

END_OF_FOLDER = b"\0"
"""Ends the path that a node reads from its standard input."""

_END_TIMEOUT_S = 5.0

_early: subprocess.Popen[bytes] | None = None
"""A node that has not got its folder yet."""


def start_node(folder: str) -> subprocess.Popen[bytes]:
    """Start a node in ``folder``: the early one if there is one, else a new one.

    Until a server uses it, it ends with its standard input.
    """
    global _early
    node, _early = _early, None
    if node is not None:
        assert node.stdin is not None
        try:
            node.stdin.write(os.fsencode(folder) + END_OF_FOLDER)
            node.stdin.flush()
        except BrokenPipeError:  # it has waited for too long
            _end(node)
        else:
            return node
    return _start(folder)


def start_early_node() -> None:
    """Start a node that ``start_node`` will use, if it is called soon."""
    global _early
    with suppress(OSError):  # then start_node raises it
        _early = _start()


def drop_early_node() -> None:
    """End an early node that is not needed."""
    global _early
    if _early is not None:
        _end(_early)
        _early = None


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    with interrupts_held_back():
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cluster.node", *arguments],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )


def _end(node: subprocess.Popen[bytes]) -> None:
    assert node.stdin is not None
    with suppress(BrokenPipeError):
        node.stdin.close()
    try:
        node.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
