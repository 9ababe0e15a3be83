"""The endpoints of responses."""

import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.core import InvalidRequest
from shoal.core.service import NO_GOALS
from shoal.serve.api import Api
from shoal.serve.chats import prepare_chat
from shoal.serve.errors import RESPONSE_NOT_FOUND
from shoal.serve.exchange import exchange_of
from shoal.serve.field_names import errors_named
from shoal.serve.generation import GenerationRequest
from shoal.serve.generation_response import Framing, GenerationResponse
from shoal.serve.logprobs import LogprobFormatter
from shoal.serve.openapi import fails, returns, streams, takes
from shoal.serve.responses import ResponseEvent, ResponseObject
from shoal.serve.stateless.body import FIELD_NAMES, ResponsesBody
from shoal.serve.stateless.format import ResponsesFormat

_TYPE = b'{"type":"'


class ResponsesEndpoints:
    """Responses, of which none is stored."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        documented = returns(ResponseObject, "The response, full or as a stream.")
        documented[200]["content"].update(streams(ResponseEvent))
        errors = fails(400, 404, 413, 415, 429, 500, 503)
        app.post("/v1/responses", responses=documented | errors, openapi_extra=takes(ResponsesBody))(
            self.create
        )
        for method, path in (
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("POST", "/v1/responses/{response_id}/cancel"),
            ("GET", "/v1/responses/{response_id}/input_items"),
        ):
            app.add_api_route(path, self.stored, methods=[method], include_in_schema=False)

    async def stored(self, response_id: str) -> Response:
        """No response is stored; raises InvalidRequest (404)."""
        raise InvalidRequest(
            f"no response {response_id!r}: responses are not stored here; keep what POST /v1/responses"
            " returns, and send the whole history as input",
            param="response_id",
            code=RESPONSE_NOT_FOUND,
        )

    async def create(self, request: Request) -> Response:
        """Write the next items of a conversation."""
        arrival_ns = time.monotonic_ns()
        body = await self._api.body(request, ResponsesBody)
        card = self._api.card(request, body.model, "model")
        chat = await prepare_chat(
            self._api,
            body.model,
            body.conversation_messages(),
            body.tool_use(),
            body.template_fields(),
            body.sampling(card.sampling_defaults),
            FIELD_NAMES,
        )
        with errors_named(FIELD_NAMES):
            tokens = await self._api.encode(body.model, [chat.text], add_special_tokens=False)
        generation = GenerationRequest(
            id=f"resp_{exchange_of(request.scope).id}",
            service=body.model,
            prompts=tokens,
            sampling=chat.sampling,
            arrival_ns=arrival_ns,
            slo=NO_GOALS if body.slo is None else body.slo.slo(),
            field_names=chat.field_names,
        )
        tokenizer = self._api.tokenizer(body.model)
        reported = chat.sampling.logprobs
        format = ResponsesFormat(
            generation.id,
            body,
            chat.sampling,
            chat.reading,
            None if reported is None else LogprobFormatter(tokenizer, reported),
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        )
        api, framing = self._api, Framing(_event, end=b"", error=format.error)
        return GenerationResponse(
            generation, format, bool(body.stream), api.backend, api.metrics, api.lifecycle, framing
        )


def _event(payload: bytes) -> bytes:
    """A server-sent event with its name."""
    name = payload[len(_TYPE) : payload.index(b'"', len(_TYPE))]
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"
