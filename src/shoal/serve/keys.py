"""Who may use the server: API keys, the services that each may use, and its rates."""

import hmac
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.config.api_keys import ApiKey, check_key_services
from shoal.serve.errors import (
    OLLAMA_PREFIX,
    InvalidApiKey,
    RateLimited,
    ServiceNotAllowed,
    error_response,
)
from shoal.serve.exchange import exchange_of
from shoal.serve.rates import TokenBucket

OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/version", "/metrics", "/docs", "/openapi.json"}
)
"""Paths that need no key."""
_OPERATORS_PREFIX = "/admin/"
_OPERATORS_PATHS = frozenset({f"{OLLAMA_PREFIX}pull", f"{OLLAMA_PREFIX}delete"})


def is_for_operators(path: str) -> bool:
    """Whether a path is for operators, who have a key of their own."""
    return path.startswith(_OPERATORS_PREFIX) or path in _OPERATORS_PATHS


class KeyHolder:
    """What the holder of a key may do, and what is left of its rates."""

    def __init__(self, key: ApiKey) -> None:
        self.name = key.name
        """What the log calls it."""
        self.services = None if key.services is None else frozenset(key.services)
        """Those that it may use; None: all."""
        self._requests = key.requests_per_minute and TokenBucket(key.requests_per_minute)
        self._tokens = key.tokens_per_minute and TokenBucket(key.tokens_per_minute)

    def may_use(self, service: str) -> bool:
        """Whether it may use ``service``."""
        return self.services is None or service in self.services

    def check_service(self, service: str) -> None:
        """Raise ServiceNotAllowed if it may not use ``service``."""
        if not self.may_use(service):
            raise ServiceNotAllowed(f"the API key {self.name!r} may not use model {service!r}")

    def start_request(self, now_s: float) -> None:
        """Count a request; raises RateLimited if it is one too many, or if the tokens are used up."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket and (wait_s := bucket.wait_s(now_s)):
                raise RateLimited(
                    f"the API key {self.name!r} may use {bucket.per_minute} {what} a minute; "
                    f"try again in {math.ceil(wait_s)} s",
                    wait_s,
                )
        if self._requests:
            self._requests.take(1, now_s)

    def use_tokens(self, tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or an output."""
        if self._tokens:
            self._tokens.take(tokens, now_s)


class Keyring:
    """All keys; raises ConfigError if one names a service that is not among ``services``."""

    def __init__(self, keys: Sequence[ApiKey], services: Collection[str]) -> None:
        check_key_services(keys, services)
        self._holders = [(digest(key.key.encode()), KeyHolder(key)) for key in keys]

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._holders)

    def holder(self, headers: Iterable[tuple[bytes, bytes]]) -> KeyHolder:
        """Whose key the Authorization header has; raises InvalidApiKey.

        The time that this takes tells nothing about the keys: digests are compared, and always all of them.
        """
        secret = bearer(headers)
        if secret is None:
            raise InvalidApiKey("this server needs an API key; send it as Authorization: Bearer KEY")
        sent = digest(secret)
        found = [holder for known, holder in self._holders if hmac.compare_digest(known, sent)]
        if not found:
            raise InvalidApiKey("the API key in Authorization: Bearer KEY is not one of this server's")
        return found[0]


class KeyMiddleware:
    """Rejects requests without a key, except for the paths that need none, and those of operators.

    is_operator: whether a request has the key of operators. They may ask all of Ollama's API with it, whose
    clients send one key with every request and some of whose requests are for operators alone.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, is_operator: Callable[[Scope], bool]) -> None:
        self._app = app
        self._keyring = keyring
        self._is_operator = is_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN_PATHS and not is_for_operators(path):
            try:
                exchange_of(scope).key = self._keyring.holder(scope["headers"])
            except InvalidApiKey as error:
                if not (path.startswith(OLLAMA_PREFIX) and self._is_operator(scope)):
                    await error_response(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What the Authorization header has behind ``Bearer``; b"": another scheme, None: no header."""
    sent = next((value for name, value in headers if name == b"authorization"), None)
    if sent is None:
        return None
    scheme, _, secret = sent.partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else b""


def digest(secret: bytes) -> bytes:
    """Of equal length for every secret, so that a comparison tells nothing."""
    return sha256(secret).digest()
