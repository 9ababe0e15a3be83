"""Starting processes that a terminal's Ctrl-C does not reach."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

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
