"""Processes that others start: Ctrl-C is not theirs, and they end with whoever started them."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PARENT_CHECK_S = 1.0
_INTERRUPT = {signal.SIGINT}
_holding = 0


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """What is started inside never sees SIGINT, which a terminal sends to all; it comes here afterwards.

    A process that set this up itself would be interrupted while it imports what it needs for that.
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


def end_with_parent(lifeline: int) -> None:
    """From now on, end this process at once when its parent is gone, or closes its end of ``lifeline``.

    lifeline: file descriptor of a pipe whose other end only the parent has, and never writes to.
    """
    arguments = (lifeline, os.getppid())
    threading.Thread(target=_watch, args=arguments, name="parent-watch", daemon=True).start()


def _watch(lifeline: int, parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([lifeline], [], [], _PARENT_CHECK_S)
        try:
            if readable and not os.read(lifeline, 1):
                break
        except ConnectionError:  # the parent ended without having read everything
            break
    os._exit(1)
