"""Stop requests of a server: SIGTERM or Ctrl-C drains it, a second one aborts it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopSignal:
    """The first stop request sets ``drain``, the second ``abort``."""

    def __init__(self, on_drain: Callable[[], None] | None = None) -> None:
        """on_drain: called at the first request."""
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()
        self._on_drain = on_drain

    def request(self) -> None:
        """Request a drain, or the second time an immediate stop."""
        if self.drain.is_set():
            self.abort.set()
            return
        self.drain.set()
        if self._on_drain is not None:
            self._on_drain()

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
