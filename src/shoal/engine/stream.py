"""What a client reads of one call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from shoal.engine.reader import Delta


class Stream(AsyncIterator[Delta]):
    """The deltas of all choices of one call, in the order in which the engine made them.

    Ends after the last delta of the last choice, or raises InvalidRequest or EngineDied after the
    deltas that came before. Closing it early cancels what is unfinished. Reading slowly delays nobody
    else: deltas wait here.
    """

    def __init__(self, call_id: str, prompt_tokens: int, close: Callable[[], None]) -> None:
        self.id = call_id
        self.prompt_tokens = prompt_tokens
        self._close = close
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    def push(self, delta: Delta) -> None:
        """Add a delta; for the owner of the stream."""
        self._deltas.append(delta)
        self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """No more deltas come, because of ``error`` or because all were sent; for the owner."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()

    @property
    def ended(self) -> bool:
        """Whether no more deltas come; some may still be unread."""
        return self._ended

    async def __anext__(self) -> Delta:
        """The next delta."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    async def aclose(self) -> None:
        """Cancel what is unfinished; what was not read is dropped."""
        if not self._ended:
            self._close()
        self._ended, self._error = True, None
        self._deltas.clear()
        self._news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
