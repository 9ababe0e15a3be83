"""An event loop whose clock jumps to whatever comes next: hours of waiting take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: time passes instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("nothing will ever happen any more")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time."""

    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s

    def now_ns(self) -> int:
        return round(self.jumping.now_s * 1e9)


def run_virtually(work: Coroutine[object, object, Result]) -> Result:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
