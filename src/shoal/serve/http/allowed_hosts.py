"""Checks the Host header against allowed names, as a defense against DNS rebinding."""

from collections.abc import Collection
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import HostNotAllowed
from shoal.serve.http.error_responses import error_response, shorten

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY = "*"
"""Matches every name."""
_MAX_NAME_CHARACTERS = 80


def allowed_hosts(configured: Collection[str] | None, bound: str, address: str) -> frozenset[str] | None:
    """Names that are allowed in the Host header; None: any.

    configured: the names in the options. bound: the host to listen on. address: its address. By default,
    names are limited only on a loopback address, because the names of other addresses are unknown.
    """
    if configured is None:
        if not is_loopback(address):
            return None
        configured = (*LOOPBACK_NAMES, bound)
    return None if ANY in configured else frozenset(map(host_name, configured))


class AllowedHostsMiddleware:
    """Rejects requests for other hosts; those without a Host header pass, because browsers always send it."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == b"host" and host_name(value.decode("latin-1")) not in self._hosts:
                await self._rejection(value.decode("latin-1"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _rejection(self, host: str) -> ASGIApp:
        return error_response(
            HostNotAllowed(
                f"requests for the host {shorten(host, _MAX_NAME_CHARACTERS)!r} are not answered here; "
                f"possible: {', '.join(sorted(self._hosts))} (server.allowed_hosts)"
            )
        )


def is_loopback_host(host: str) -> bool:
    """Whether a Host header or an address is a loopback name or address, with or without a port."""
    name = host_name(host)
    return name == "localhost" or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is an IP address that only this machine can reach."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def host_name(host: str) -> str:
    """The name in a Host header: without port and brackets, in lower case."""
    host = host.strip().lower()
    name, _, port = host.rpartition(":")
    if port.isdigit() and (":" not in name or name.endswith("]")):
        host = name
    return host.strip("[]").rstrip(".")
