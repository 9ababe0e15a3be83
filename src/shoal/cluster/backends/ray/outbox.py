"""Messages that somebody fetches, each exactly once although answers may be lost on their way."""

import asyncio
from collections import deque


class Outbox:
    """Numbered messages, kept until the reader has asked for those behind them."""

    def __init__(self) -> None:
        self._first = 0
        self._kept: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Add a message."""
        self._kept.append(message)
        self._news.set()

    async def read(self, number: int) -> list[bytes]:
        """The messages from this number on, at least one; the reader has those before it."""
        while self._first < number and self._kept:
            self._kept.popleft()
            self._first += 1
        while not self._kept:
            self._news.clear()
            await self._news.wait()
        return list(self._kept)
