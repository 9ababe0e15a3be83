"""The context of one HTTP request: id, API key, token counts, times and status, for limits and logs."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.core import Client, SamplingParams
from shoal.frontend.timeline import Timeline
from shoal.serve.http.api_key_limits import ApiKeyLimits

if TYPE_CHECKING:
    from opentelemetry.trace import Span

REQUEST_ID = "x-request-id"
_VALID_ID = re.compile(rb"[A-Za-z0-9._:+=/@-]{1,128}")
_CLIENT_DISCONNECTED = 499
_SCOPE_KEY = "shoal.context"


@dataclass(slots=True)
class RequestContext:
    """What is known of a request and its response."""

    id: str
    """From the client's x-request-id, or else random."""
    arrival_ns: int
    """When the headers were complete, on the monotonic clock."""
    key: ApiKeyLimits | None = None
    """The API key; None: the server has no keys, or the path needs none."""
    service: str | None = None
    """The requested service, if it exists."""
    prompt_tokens: int = 0
    """Of all prompts."""
    output_tokens: int = 0
    """Of all choices."""
    queue_s: float | None = None
    """Queue time of the choice whose first token came first: from arrival to its first admission."""
    load_ns: int = 0
    """How long the request waited for its service to load; 0: the service was loaded."""
    first_token_s: float | None = None
    """TTFT of the same choice."""
    status: int = _CLIENT_DISCONNECTED
    """HTTP status; 499: the client disconnected before the response started."""
    why: str = ""
    """Why the request failed, for the log."""
    end_ns: int = 0
    """When the response was complete or given up, on the monotonic clock; 0: it is not."""
    sampling: SamplingParams | None = None
    """Of its output; None: it asked for none, or was refused before."""
    timelines: list[Timeline] = field(default_factory=list)
    """Of its choices that were submitted."""
    span: "Span | None" = None
    """Its OpenTelemetry span, if spans are exported."""
    epoch_ns: int = 0
    """The time of day minus the monotonic clock at the begin of the span."""
    traceparent: bytes = b""
    """The W3C header of the span, for the response; b"": there is none."""

    @property
    def client(self) -> Client | None:
        """Whose share of the engines it counts against; None: it has no key."""
        return None if self.key is None else self.key.client

    @property
    def trace_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"traceparent", self.traceparent)] if self.traceparent else []

    def count_tokens(self, prompt: int, output: int) -> None:
        """Count tokens, also toward the rate limit of the API key."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        if self.key is not None:
            self.key.use_tokens(prompt + output, time.monotonic())


OnRequest = Callable[[RequestContext, Scope], None]


def context_of(scope: Scope) -> RequestContext:
    """The context of a request; created if the middleware has not run."""
    if _SCOPE_KEY not in scope:
        scope[_SCOPE_KEY] = RequestContext(_request_id(scope), time.monotonic_ns())
    return scope[_SCOPE_KEY]  # type: ignore[no-any-return]


class RequestContextMiddleware:
    """Creates the RequestContext of each request, and adds its id to every response.

    on_begin, on_end: called with the context and the ASGI scope at the begin and end of each request.
    """

    def __init__(self, app: ASGIApp, on_begin: OnRequest, on_end: OnRequest) -> None:
        self._app = app
        self._on_begin = on_begin
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        header = (REQUEST_ID.encode(), context.id.encode())
        self._on_begin(context, scope)

        # Not a coroutine function, for speed: a stream sends a message for every token.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), header, *context.trace_headers],
                }
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            context.status, context.why = 500, "internal error"
            raise
        finally:
            context.end_ns = time.monotonic_ns()
            self._on_end(context, scope)


def _request_id(scope: Scope) -> str:
    """The client's id if it is safe in a header and in the log, else a random one."""
    for name, value in scope.get("headers", ()):
        if name == REQUEST_ID.encode() and _VALID_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(12)
