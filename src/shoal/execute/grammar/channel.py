"""Messages between an engine and a process of a grammar, which may be stopped or killed at any moment."""

import socket
from collections.abc import Callable

Look = Callable[[], None]
"""Called while nothing moves; ends the wait by raising an error."""

_HEADER_BYTES = 4


def _patiently() -> None:
    """Wait on."""


class Channel:
    """Messages over a socket, each behind its length. Whatever is wrong with the other end is an OSError.

    look_s: while the other end is waited for, ``look`` is called whenever nothing has moved for so long.
    """

    def __init__(self, end: socket.socket, look_s: float | None = None) -> None:
        self._socket = end
        end.settimeout(look_s)

    def send(self, message: bytes, look: Look = _patiently) -> None:
        """Send a message; the other end may have to read before it fits."""
        left = memoryview(len(message).to_bytes(_HEADER_BYTES) + message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                look()

    def receive(self, look: Look = _patiently) -> bytearray:
        """Wait for the next message."""
        return self._read(int.from_bytes(self._read(_HEADER_BYTES, look)), look)

    def _read(self, size: int, look: Look) -> bytearray:
        message = bytearray(size)
        left = memoryview(message)
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                look()
                continue
            if not count:
                raise ConnectionResetError("the other end is gone")
            left = left[count:]
        return message

    def close(self) -> None:
        """Let the other end know that nothing more comes."""
        self._socket.close()
