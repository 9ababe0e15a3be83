"""The endpoints /v1/messages and /v1/messages/count_tokens."""

import time
from functools import partial

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

from shoal.serve.anthropic.message_format import MessageFormat
from shoal.serve.anthropic.request_body import FIELD_NAMES, CountBody, MessagesBody
from shoal.serve.api import Api, json_response
from shoal.serve.generation_response import Framing, GenerationResponse
from shoal.serve.http.message_errors import MESSAGES_PATH, encode_message_error
from shoal.serve.http.request_context import context_of
from shoal.serve.named_events import named_event
from shoal.serve.openai.chat_requests import ChatRequests

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_END = named_event(b'{"type":"message_stop"}')


class TokenCount(Struct):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesEndpoints:
    """Anthropic's Messages API, for text and tools."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._requests = ChatRequests(api, "msg", FIELD_NAMES)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; Anthropic documents them, so the OpenAPI document leaves them out."""
        app.post(MESSAGES_PATH, include_in_schema=False)(self.create)
        app.post(f"{MESSAGES_PATH}/count_tokens", include_in_schema=False)(self.count)

    async def count(self, request: Request) -> Response:
        """Count the prompt tokens of a message, even beyond the context."""
        body = await self._api.body(request, CountBody)
        return json_response(TokenCount(await self._requests.count_tokens(request, body)))

    async def create(self, request: Request) -> Response:
        """Write the next message of a conversation."""
        arrival_ns = time.monotonic_ns()
        body = await self._api.body(request, MessagesBody)
        chat, generation = await self._requests.make(request, body, arrival_ns)
        format = MessageFormat(generation.id, body.model, chat.parsing)
        error = partial(encode_message_error, request_id=context_of(request.scope).id)
        framing = Framing(named_event, end=_END, comment=_PING, error=error)
        api = self._api
        return GenerationResponse(
            generation, format, bool(body.stream), api.backend, api.metrics, api.lifecycle, framing
        )
