"""Notifies a service manager, such as systemd, of a server's start and end (``Type=notify``)."""

import logging
import os
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)
# A full queue of the service manager may delay the server by this time, but not stop it.
_SEND_TIMEOUT_S = 1.0
_LONGEST_EXTENSION_S = 86_400.0


class ServiceManager:
    """The service manager that listens on the datagram socket ``NOTIFY_SOCKET``; without one nothing is sent.

    A message that cannot be sent is logged and dropped: it never ends the server.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, *, extension_s: float) -> None:
        """extension_s: how long the start may take from each report of progress on."""
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the zero byte of Linux's abstract socket names.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._extension = f"EXTEND_TIMEOUT_USEC={int(min(extension_s, _LONGEST_EXTENSION_S) * 1e6)}"

    def starting(self, status: str) -> None:
        """Report what is downloaded or loaded, and extend the time-out of the start."""
        self._send(_status(status), self._extension)

    def extend(self) -> None:
        """Extend the time-out of the start: it still makes progress, or is ended by the server itself."""
        self._send(self._extension)

    def ready(self, url: str) -> None:
        """Report that the server accepts requests."""
        self._send("READY=1", _status(f"ready at {url}"))

    def stopping(self) -> None:
        """Report that the server drains, or ends while it starts."""
        self._send("STOPPING=1", _status("stopping"))

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(assignments).encode(), self._address)
        except (OSError, ValueError) as error:
            _log.warning("NOTIFY_SOCKET: cannot notify the service manager: %s", error)


def _status(text: str) -> str:
    """A line that cannot begin another assignment."""
    return f"STATUS={' '.join(text.split())}"
