"""Asking a server to stop."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignal:
    """Tells the server to stop: asked once it drains, asked again it stops at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()

    def ask(self) -> None:
        """Ask the server to drain, or the second time to stop at once."""
        (self.abort if self.drain.is_set() else self.drain).set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Call ``ask`` on SIGTERM, SIGINT and SIGHUP; only in the main thread, inside its event loop.

        Not on SIGHUP where it is ignored, as under nohup.
        """
        loop = asyncio.get_running_loop()
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
