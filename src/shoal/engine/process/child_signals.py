"""Starting processes that a terminal's Ctrl-C does not reach, and killing them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_INTERRUPT = {signal.SIGINT}
_holding = 0


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Processes started inside never get SIGINT, which a terminal sends to all of its processes.

    One that arrives meanwhile is delivered here afterwards. A process that blocked it by itself could still
    be interrupted while it imports the modules for that.
    """
    global _holding
    _holding += 1
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)  # children inherit it
    try:
        yield
    finally:
        _holding -= 1
        if not _holding:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


def kill_child(process: asyncio.subprocess.Process) -> None:
    """Kill a process; nothing if it is gone.

    Its own ``kill`` first polls it, which takes the exit status of one that just ended: asyncio then finds
    none, warns of an unknown process, and reports 255.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
