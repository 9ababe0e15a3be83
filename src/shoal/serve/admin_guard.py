"""Who may use the operators' routes: the holder of the admin key, or without one who sits at this machine."""

import hmac
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import AdminKeyNeeded, InvalidApiKey, NotForThisClient, error_response
from shoal.serve.hosts import LOOPBACK_NAMES, host_name
from shoal.serve.keys import ADMIN_PREFIX, Keyring, bearer, digest

# Who sends one of these is a proxy, on whose behalf anybody may ask, or a web page.
_NOT_LOCAL = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin"})
_HOW = "set server.admin_key (or SHOAL_ADMIN_KEY) at the server and send it as Authorization: Bearer KEY"


class AdminGuard:
    """Rejects requests for operators' routes from others than operators.

    key: the admin key, if there is one. keyring: the keys of clients, which are none for operators.
    """

    def __init__(self, app: ASGIApp, key: str | None, keyring: Keyring) -> None:
        self._app = app
        self._digest = None if key is None else digest(key.encode())
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] == "http" and scope["path"].startswith(ADMIN_PREFIX):
            try:
                self._check(scope)
            except (AdminKeyNeeded, NotForThisClient) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise AdminKeyNeeded or NotForThisClient."""
        if self._digest is None:
            if not _is_local(scope):
                raise NotForThisClient(f"without an admin key this route answers only this machine; {_HOW}")
            return
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        secret = bearer(headers)
        if secret is None:
            raise AdminKeyNeeded("this route needs the admin key; send it as Authorization: Bearer KEY")
        if hmac.compare_digest(self._digest, digest(secret)):
            return
        try:
            holder = self._keyring.holder(headers)
        except InvalidApiKey:
            raise AdminKeyNeeded("the key in Authorization: Bearer KEY is not the admin key") from None
        raise NotForThisClient(f"the API key {holder.name!r} is not the admin key, which this route needs")


def _is_local(scope: Scope) -> bool:
    """Whether a request was made on this machine, by no proxy and no web page."""
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"localhost").decode("latin-1")
    return (
        _is_loopback((scope.get("client") or ("", 0))[0])
        and not _NOT_LOCAL & headers.keys()
        and host_name(host) in LOOPBACK_NAMES
    )


def _is_loopback(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
