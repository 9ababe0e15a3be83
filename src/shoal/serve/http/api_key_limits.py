"""Limits of an API key: allowed services, and rate limits in requests and tokens per minute."""

import math
from dataclasses import dataclass, field

from shoal.config.api_keys import ApiKey
from shoal.core import Client
from shoal.serve.errors import RateLimited, ServiceNotAllowed


class ApiKeyLimits:
    """An API key with its allowed services and the state of its rate limits."""

    def __init__(self, key: ApiKey) -> None:
        self.name = key.name
        self.client = Client(key.name, key.share)
        """Whose share of the engines its requests count against."""
        self.services = None if key.services is None else frozenset(key.services)
        """Allowed services; None: all."""
        self._requests = key.requests_per_minute and TokenBucket(key.requests_per_minute)
        self._tokens = key.tokens_per_minute and TokenBucket(key.tokens_per_minute)

    def may_use(self, service: str) -> bool:
        return self.services is None or service in self.services

    def check_service(self, service: str) -> None:
        """Raise ServiceNotAllowed unless the key may use ``service``."""
        if not self.may_use(service):
            raise ServiceNotAllowed(f"the API key {self.name!r} may not use model {service!r}")

    def start_request(self, now_s: float) -> None:
        """Count a request; raises RateLimited if the limit of requests or tokens is reached."""
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


@dataclass(slots=True)
class TokenBucket:
    """A token bucket of size ``per_minute`` that refills at this rate and starts full.

    Amounts that are known only afterwards may take the level below zero; then nothing can be taken until it
    has recovered. Times are seconds on a monotonic clock.
    """

    per_minute: float
    _level: float = field(init=False)
    _updated_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._level = self.per_minute

    def wait_s(self, now_s: float) -> float:
        """Seconds until one unit can be taken; 0: now."""
        self._refill(now_s)
        # Rounded, so that a numerical error of a billionth causes no wait.
        return max(0.0, round((1 - self._level) * 60 / self.per_minute, 6))

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount``, even if the level is lower."""
        self._refill(now_s)
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        if self._updated_s is not None:
            self._level = min(self.per_minute, self._level + (now_s - self._updated_s) * self.per_minute / 60)
        self._updated_s = now_s
