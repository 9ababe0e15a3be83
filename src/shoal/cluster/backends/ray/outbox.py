"""A message buffer for polling, with exactly-once delivery although answers may be lost."""

import asyncio
from collections import deque


class Outbox:
    """Numbered messages, kept until the reader asks for later ones."""

    def __init__(self) -> None:
        self._first = 0
        self._kept: deque[bytes] = deque()
        self._available = asyncio.Event()

    def put(self, message: bytes) -> None:
        self._kept.append(message)
        self._available.set()

    async def read(self, number: int) -> list[bytes]:
        """Wait for messages from this number on; drops earlier ones, which the reader has."""
        while self._first < number and self._kept:
            self._kept.popleft()
            self._first += 1
        while not self._kept:
            self._available.clear()
            await self._available.wait()
        return list(self._kept)
