"""Signals of child processes: starting them without Ctrl-C (SIGINT), and killing them."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_INTERRUPT = {signal.SIGINT}


class _Holding(threading.local):
    """Signals are blocked by thread, and so are the bodies counted."""

    bodies = 0


_holding = _Holding()


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Processes started in the body never get SIGINT, which a terminal sends to its whole process group.

    A SIGINT during the body is delivered to this process afterwards. If the child blocked the signal itself,
    it could still be interrupted during its imports. The body must begin and end in one thread.
    """
    _holding.bodies += 1
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)  # children inherit it
    try:
        yield
    finally:
        _holding.bodies -= 1
        if not _holding.bodies:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


def kill_child(process: asyncio.subprocess.Process) -> None:
    """Kill a process; does nothing if it has ended.

    ``Process.kill`` first polls the process, which reaps one that just ended: asyncio then finds no exit
    status, warns of an unknown process, and reports 255.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
