"""Framed messages over a socket between an engine and a grammar process, which may be stopped or killed."""

import socket
from collections.abc import Callable

Poll = Callable[[], None]
"""Called periodically during a wait; ends it by raising an error."""

_HEADER_BYTES = 4


def _keep_waiting() -> None:
    """A ``Poll`` that never ends the wait."""


class Channel:
    """Length-prefixed messages over a socket. All failures of the other end are raised as OSError.

    poll_s: interval at which ``poll`` is called while no bytes can be sent or received; None for never.
    """

    def __init__(self, end: socket.socket, poll_s: float | None = None) -> None:
        self._socket = end
        end.settimeout(poll_s)

    def send(self, message: bytes, poll: Poll = _keep_waiting) -> None:
        """Send a message; blocks until the other end reads if the socket buffer is full."""
        left = memoryview(len(message).to_bytes(_HEADER_BYTES) + message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                poll()

    def receive(self, poll: Poll = _keep_waiting) -> bytearray:
        """Wait for the next message."""
        return self._read(int.from_bytes(self._read(_HEADER_BYTES, poll)), poll)

    def _read(self, size: int, poll: Poll) -> bytearray:
        message = bytearray(size)
        left = memoryview(message)
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                poll()
                continue
            if not count:
                raise ConnectionResetError("the other end is gone")
            left = left[count:]
        return message

    def close(self) -> None:
        self._socket.close()
