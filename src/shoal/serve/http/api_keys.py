"""API key authentication: which paths need a key, and whose key a request has."""

import hmac
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.config.api_keys import ApiKey, check_key_services
from shoal.serve.errors import InvalidApiKey
from shoal.serve.http.api_key_limits import ApiKeyLimits
from shoal.serve.http.error_responses import OLLAMA_PREFIX, error_response
from shoal.serve.http.message_errors import is_messages_path
from shoal.serve.http.request_context import context_of

OPEN_PATHS = frozenset(
    {
        "/",
        "/health",
        "/health/live",
        "/health/ready",
        "/version",
        "/metrics",
        "/scale",
        "/docs",
        "/openapi.json",
    }
)
"""Paths that need no key."""
_PAGE_PREFIX = "/page/"
_LIVE_PATH = "/live"
_OPERATORS_PREFIX = "/admin/"
_OPERATORS_PATHS = frozenset({f"{OLLAMA_PREFIX}pull", f"{OLLAMA_PREFIX}delete"})


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(_PAGE_PREFIX)


def is_for_operators(path: str) -> bool:
    """Whether a path is for operators, who have their own key."""
    return path.startswith(_OPERATORS_PREFIX) or path in _OPERATORS_PATHS


class Keyring:
    """All API keys; raises ConfigError if a key names a service that is not among ``services``."""

    def __init__(self, keys: Sequence[ApiKey], services: Collection[str]) -> None:
        check_key_services(keys, services)
        self._keys = [(digest(key.key.encode()), ApiKeyLimits(key)) for key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, headers: Iterable[tuple[bytes, bytes]], *, takes_x_api_key: bool = False) -> ApiKeyLimits:
        """The key in the Authorization header; raises InvalidApiKey.

        takes_x_api_key: whether it may be in x-api-key instead, where Anthropic's clients send it.

        The duration reveals nothing about the keys: digests are compared, and always all of them.
        """
        secret = bearer_token(headers)
        if secret is None and takes_x_api_key:
            secret = _header(headers, b"x-api-key")
        if secret is None:
            raise InvalidApiKey("this server needs an API key; send it as Authorization: Bearer KEY")
        sent = digest(secret)
        found = [find for known, find in self._keys if hmac.compare_digest(known, sent)]
        if not found:
            raise InvalidApiKey("the API key in Authorization: Bearer KEY is not one of this server's")
        return found[0]


class ApiKeyMiddleware:
    """Rejects requests without a valid key, except on open paths and operators' paths.

    is_operator: whether a request has the admin key. The page's feed accepts it, and all of Ollama's API,
    because Ollama's clients send one key with every request, and some routes are for operators only.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, is_operator: Callable[[Scope], bool]) -> None:
        self._app = app
        self._keyring = keyring
        self._is_operator = is_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and not is_open(path) and not is_for_operators(path):
            try:
                context_of(scope).key = self._keyring.find(
                    scope["headers"], takes_x_api_key=is_messages_path(path)
                )
            except InvalidApiKey as error:
                takes_admin_key = path == _LIVE_PATH or path.startswith(OLLAMA_PREFIX)
                if not (takes_admin_key and self._is_operator(scope)):
                    await error_response(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The token after ``Bearer`` in the Authorization header; b"": another scheme, None: no header."""
    sent = _header(headers, b"authorization")
    if sent is None:
        return None
    scheme, _, secret = sent.partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else b""


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for sent, value in headers if sent == name), None)


def digest(secret: bytes) -> bytes:
    """A digest of fixed length, so that a comparison does not reveal the secret's length."""
    return sha256(secret).digest()
