"""Stop requests of a server: SIGTERM or Ctrl-C drains it, a second one aborts it."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignal:
    """The first stop request sets ``drain``, the second ``abort``."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()

    def request(self) -> None:
        """Request a drain, or the second time an immediate stop."""
        (self.abort if self.drain.is_set() else self.drain).set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Call ``request`` on SIGTERM, SIGINT and SIGHUP; only in the main thread, inside its event loop.

        SIGHUP stays ignored where it is ignored, as under nohup.
        """
        loop = asyncio.get_running_loop()
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
