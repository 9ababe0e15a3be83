"""What the holder of an API key may do, and what is left of its rates."""

import math
from dataclasses import dataclass, field

from shoal.config.api_keys import ApiKey
from shoal.serve.errors import RateLimited, ServiceNotAllowed


class ApiKeyLimits:
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


@dataclass(slots=True)
class TokenBucket:
    """Fills at ``per_minute`` and holds as much as that; it starts full.

    What is only known afterwards is taken although it is more than there is; then nothing more is to be had
    until the debt has been paid off. Times are seconds on any clock that only goes forward.
    """

    per_minute: float
    """What comes in a minute, and the most that it holds."""
    _level: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)
    """When the level was that."""

    def __post_init__(self) -> None:
        """Fill it."""
        self._level = self.per_minute

    def wait_s(self, now_s: float) -> float:
        """How long it takes until one can be taken; 0: one can be taken now."""
        self._fill(now_s)
        # Without rounding, a rest of a billionth would become a wait.
        return max(0.0, round((1 - self._level) * 60 / self.per_minute, 6))

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount``, however much there is."""
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
