"""For whom a request must be meant, so that no web page can have its own name point at this server."""

from collections.abc import Collection
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import HostNotAllowed, error_response, shorten

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = "*"
_LONGEST_NAME = 80


def allowed_hosts(configured: Collection[str] | None, bound: str, address: str) -> frozenset[str] | None:
    """Names that ``Host`` may have; None: any.

    configured: what the user chose. bound: what the user listens on, and address: its address; by default
    only loopback addresses are choosy, since others are reached under names that nobody knows here.
    """
    if configured is None:
        if not ip_address(address).is_loopback:
            return None
        configured = (*_LOOPBACK, bound)
    return None if _ANY in configured else frozenset(map(_name, configured))


class AllowedHosts:
    """Turns away requests that are meant for others; those without ``Host`` pass, no browser sends them."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or turn it away."""
        for name, value in scope.get("headers", ()):
            if name == b"host" and _name(value.decode("latin-1")) not in self._hosts:
                await self._refuse(value.decode("latin-1"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, host: str) -> ASGIApp:
        return error_response(
            HostNotAllowed(
                f"requests for the host {shorten(host, _LONGEST_NAME)!r} are not answered here; possible: "
                f"{', '.join(sorted(self._hosts))} (server.allowed_hosts)"
            )
        )


def _name(host: str) -> str:
    """A host without its port and without brackets."""
    host = host.strip().lower()
    name, _, port = host.rpartition(":")
    if port.isdigit() and (":" not in name or name.endswith("]")):
        host = name
    return host.strip("[]").rstrip(".")
