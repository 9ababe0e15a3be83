"""One HTTP request and its answer: what limits, metrics and the access log know of it."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.http.api_key_limits import ApiKeyLimits

REQUEST_ID = "x-request-id"
_VALID_ID = re.compile(rb"[A-Za-z0-9._:+=/@-]{1,128}")
_CLIENT_LEFT = 499
_SCOPE_KEY = "shoal.context"


@dataclass(slots=True)
class RequestContext:
    """A request and its answer."""

    id: str
    """What the client called it with x-request-id, else a random name."""
    arrival_ns: int
    """When its headers had been read, on the monotonic clock."""
    key: ApiKeyLimits | None = None
    """Whose API key it came with; None: the server has no keys, or needs none for this path."""
    service: str | None = None
    """The service that it asked, if there is one."""
    prompt_tokens: int = 0
    """Of all prompts."""
    output_tokens: int = 0
    """Of all choices."""
    queue_s: float | None = None
    """From arrival to the first admission of the first choice that began."""
    load_ns: int = 0
    """How long it waited until its service was loaded; 0: it was."""
    first_token_s: float | None = None
    """From arrival to its first token."""
    status: int = _CLIENT_LEFT
    """HTTP status of the answer; 499: the client left before it began."""
    why: str = ""
    """What went wrong, for the log."""

    def count_tokens(self, prompt: int, output: int) -> None:
        """Count tokens, also for the rate of the API key."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        if self.key is not None:
            self.key.use_tokens(prompt + output, time.monotonic())


def context_of(scope: Scope) -> RequestContext:
    """The context that a request belongs to; outside of the application a new one."""
    if _SCOPE_KEY not in scope:
        scope[_SCOPE_KEY] = RequestContext(_request_id(scope), time.monotonic_ns())
    return scope[_SCOPE_KEY]  # type: ignore[no-any-return]


class RequestContextMiddleware:
    """Keeps an RequestContext for each request, and returns its id with every answer.

    on_end: called with every context and its ASGI scope when it is over.
    """

    def __init__(self, app: ASGIApp, on_end: Callable[[RequestContext, Scope], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        header = (REQUEST_ID.encode(), context.id.encode())

        # Not a coroutine of its own: a stream sends a message for every token.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            context.status, context.why = 500, "internal error"
            raise
        finally:
            self._on_end(context, scope)


def _request_id(scope: Scope) -> str:
    """The id that the client sent, if it is one that a header and a line of a log can hold."""
    for name, value in scope.get("headers", ()):
        if name == REQUEST_ID.encode() and _VALID_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(12)
