"""What the holder of an API key may do, and what is left of its rates."""

import math

from shoal.config.api_keys import ApiKey
from shoal.serve.errors import RateLimited, ServiceNotAllowed
from shoal.serve.http.rates import TokenBucket


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
