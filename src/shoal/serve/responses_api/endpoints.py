"""The endpoint /v1/responses, input_tokens below it, and the routes of stored responses, which answer 404."""

import time

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shoal.core import InvalidRequest
from shoal.serve.api import Api, json_response
from shoal.serve.errors import RESPONSE_NOT_FOUND
from shoal.serve.generation_response import Framing, GenerationResponse
from shoal.serve.named_events import named_event
from shoal.serve.openai.chat_requests import ChatRequests
from shoal.serve.openai.logprobs import LogprobFormatter
from shoal.serve.openai.response_bodies import InputTokenCount, ResponseEvent, ResponseObject
from shoal.serve.openapi import fails, returns, streams, takes
from shoal.serve.responses_api.request_body import FIELD_NAMES, ResponsesBody
from shoal.serve.responses_api.response_format import ResponsesFormat

_COUNT = "input_tokens"


class ResponsesEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._requests = ChatRequests(api, "resp", FIELD_NAMES)

    def add_to(self, app: FastAPI) -> None:
        documented = returns(ResponseObject, "The response, full or as a stream.")
        documented[200]["content"].update(streams(ResponseEvent))
        errors = fails(400, 404, 413, 415, 429, 500, 503)
        app.post("/v1/responses", responses=documented | errors, openapi_extra=takes(ResponsesBody))(
            self.create
        )
        counted = returns(InputTokenCount, InputTokenCount.__doc__ or "") | fails(400, 404, 413, 415, 503)
        app.post(f"/v1/responses/{_COUNT}", responses=counted, openapi_extra=takes(ResponsesBody))(self.count)
        for method, path in (
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("POST", "/v1/responses/{response_id}/cancel"),
            ("GET", "/v1/responses/{response_id}/input_items"),
        ):
            app.add_api_route(path, self.stored_response, methods=[method], include_in_schema=False)

    async def stored_response(self, response_id: str) -> Response:
        """Raise InvalidRequest (404), because no response is stored."""
        if response_id == _COUNT:  # not an id but a route, with another method
            raise HTTPException(405, headers={"Allow": "POST"})
        raise InvalidRequest(
            f"no response {response_id!r}: responses are not stored here; keep what POST /v1/responses"
            " returns, and send the whole history as input",
            param="response_id",
            code=RESPONSE_NOT_FOUND,
        )

    async def count(self, request: Request) -> Response:
        """Count the prompt tokens of a request for a response, even beyond the context."""
        body = await self._api.body(request, ResponsesBody)
        return json_response(InputTokenCount(await self._requests.count_tokens(request, body)))

    async def create(self, request: Request) -> Response:
        """Write the next items of a conversation."""
        arrival_ns = time.monotonic_ns()
        body = await self._api.body(request, ResponsesBody)
        chat, generation = await self._requests.make(request, body, arrival_ns)
        tokenizer = self._api.tokenizer(body.model)
        num_logprobs = chat.sampling.logprobs
        format = ResponsesFormat(
            generation.id,
            body,
            chat.sampling,
            chat.parsing,
            None if num_logprobs is None else LogprobFormatter(tokenizer, num_logprobs),
            tokenizer.token_bytes,
        )
        api, framing = self._api, Framing(named_event, end=b"", error=format.error)
        return GenerationResponse(
            generation, format, bool(body.stream), api.backend, api.metrics, api.lifecycle, framing
        )
