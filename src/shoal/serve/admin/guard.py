"""Access to the operators' routes: with the admin key or, without any keys, from programs on this machine."""

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import AdminAccessDenied, AdminKeyRequired, InvalidApiKey
from shoal.serve.http.allowed_hosts import is_loopback, is_loopback_host
from shoal.serve.http.api_keys import Keyring, bearer_token, digest, is_for_operators
from shoal.serve.http.error_responses import error_response, shorten

# Headers that programs and browsers send themselves. Any other header is taken as a proxy's, since no list of
# proxies' headers is complete.
_DIRECT_HEADERS = frozenset(
    {
        b"accept",
        b"accept-charset",
        b"accept-encoding",
        b"accept-language",
        b"authorization",
        b"cache-control",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"dnt",
        b"expect",
        b"host",
        b"http2-settings",
        b"if-match",
        b"if-modified-since",
        b"if-none-match",
        b"if-unmodified-since",
        b"keep-alive",
        b"pragma",
        b"priority",
        b"range",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"upgrade-insecure-requests",
        b"user-agent",
        b"x-request-id",
    }
)
_DIRECT_PREFIX = b"sec-"
_PAGE_HEADERS = frozenset({b"origin", b"referer", b"sec-fetch-site"})
_MAX_NAME_CHARACTERS = 80
_KEY_HINT = "set server.admin_key (or SHOAL_ADMIN_KEY) at the server and send it as Authorization: Bearer KEY"


class OperatorRights:
    """Decides whether a request comes from an operator.

    key: the admin key; None: there is none. keyring: the API keys of clients, which are no admin keys.
    """

    def __init__(self, key: str | None, keyring: Keyring) -> None:
        self._digest = None if key is None else digest(key.encode())
        self._keyring = keyring

    def holds_key(self, scope: Scope) -> bool:
        secret = bearer_token(scope["headers"])
        if self._digest is None or secret is None:
            return False
        return hmac.compare_digest(self._digest, digest(secret))

    def check(self, scope: Scope) -> None:
        """Raise AdminKeyRequired or AdminAccessDenied unless a request comes from an operator.

        With API keys and no admin key, every request is denied, because a request from this machine may be a
        proxy's, and a server with API keys is not open to all clients.
        """
        if self._digest is not None:
            self._check_key(self._digest, scope["headers"])
        elif self._keyring:
            raise AdminAccessDenied(f"with API keys and no admin key this route answers nobody; {_KEY_HINT}")
        elif reason := _why_not_local(scope):
            raise AdminAccessDenied(
                f"without an admin key this route answers only this machine, and the request {reason}; "
                f"{_KEY_HINT}"
            )

    def _check_key(self, known: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        secret = bearer_token(headers)
        if secret is None:
            raise AdminKeyRequired("this route needs the admin key; send it as Authorization: Bearer KEY")
        if hmac.compare_digest(known, digest(secret)):
            return
        try:
            key = self._keyring.find(headers)
        except InvalidApiKey:
            raise AdminKeyRequired("the key in Authorization: Bearer KEY is not the admin key") from None
        raise AdminAccessDenied(f"the API key {key.name!r} is not the admin key, which this route needs")


class AdminMiddleware:
    """Rejects requests for operators' routes that do not come from operators."""

    def __init__(self, app: ASGIApp, rights: OperatorRights) -> None:
        self._app = app
        self._rights = rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_for_operators(scope["path"]):
            try:
                self._rights.check(scope)
            except (AdminKeyRequired, AdminAccessDenied) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _why_not_local(scope: Scope) -> str:
    """Why a request does not seem to come from a program on this machine; "": it seems to.

    A proxy that adds no header and sends the Host of a loopback address is not detected.
    """
    address = (scope.get("client") or ("", 0))[0]
    if not is_loopback(address):
        return f"comes from {address or 'an unknown address'}"
    if scope.get("http_version") == "1.0":
        return "is HTTP/1.0, which proxies speak"
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if not hosts:
        return "has no Host"
    for host in hosts:
        if not is_loopback_host(host):
            return f"is for the host {shorten(host, _MAX_NAME_CHARACTERS)!r}"
    own_page = _is_own_page(scope["headers"])
    for name, value in scope["headers"]:
        if own_page and name in _PAGE_HEADERS:
            continue
        if name == b"sec-fetch-site" and value.lower() != b"none":
            return "is a web page's (Sec-Fetch-Site)"
        if name not in _DIRECT_HEADERS and not name.startswith(_DIRECT_PREFIX):
            shown = shorten(name.decode("latin-1"), _MAX_NAME_CHARACTERS)
            return f"has the header {shown!r}, as a proxy or a web page may send it"
    return ""


def _is_own_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a browser says that a request comes from this server's own page.

    A page of another origin has another Origin and Referer, and no script can change them. A proxy that
    sends the Host of a loopback address has a public name, which they would show. A browser sends each of
    these headers once; a proxy may add another one.
    """
    found = [header for header in headers if header[0] == b"host" or header[0] in _PAGE_HEADERS]
    sent = dict(found)
    if len(sent) < len(found):
        return False
    origin = b"http://" + sent.get(b"host", b"")
    named = [sent[name] for name in (b"origin", b"referer") if name in sent]
    own = all(value == origin or value.startswith(origin + b"/") for value in named)
    return sent.get(b"sec-fetch-site", b"same-origin") == b"same-origin" and bool(named) and own
