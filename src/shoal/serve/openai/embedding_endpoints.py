"""The endpoint /v1/embeddings."""

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from anyio import to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Send

from shoal.core import InvalidRequest
from shoal.frontend.offline_batch import EMBEDDING_SAMPLING, read_embedding
from shoal.frontend.reader import Delta
from shoal.frontend.validation import check_request
from shoal.serve.api import Api
from shoal.serve.generation import GenerationRequest, submit_request
from shoal.serve.generation_response import GenerationResponse, collect
from shoal.serve.http.request_context import context_of
from shoal.serve.openai.response_bodies import (
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    PromptTokensDetails,
    Usage,
    encode,
    encoded,
)
from shoal.serve.openai.response_formats import Output
from shoal.serve.openai.token_and_embedding_bodies import EmbeddingBody
from shoal.serve.openapi import fails, returns, takes

# Inputs of a request that are in the engine's queue at once; a client may send thousands.
_INPUTS_AT_ONCE = 64


class EmbeddingEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        responses = returns(EmbeddingList, "A vector for each input.")
        errors = fails(400, 404, 413, 415, 429, 500, 503)
        takes_body = takes(EmbeddingBody)
        app.post("/v1/embeddings", responses=responses | errors, openapi_extra=takes_body)(self.embeddings)

    async def embeddings(self, request: Request) -> Response:
        """Embed one text or several."""
        arrival_ns = time.monotonic_ns()
        return await self.embed(request, await self._api.body(request, EmbeddingBody), arrival_ns)

    async def embed(self, request: Request, body: EmbeddingBody, arrival_ns: int) -> GenerationResponse:
        """The response to ``body``; raises InvalidRequest and ServiceNotAllowed."""
        self._api.card(request, body.model, "model")
        tokens = await self._encode(body)
        generation_request = GenerationRequest(
            id=f"embd-{context_of(request.scope).id}",
            service=body.model,
            prompts=tokens,
            sampling=EMBEDDING_SAMPLING,
            arrival_ns=arrival_ns,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            client=context_of(request.scope).client,
            hide_output=True,
        )
        format = EmbeddingFormat(body.model, body.encoding_format == "base64")
        return EmbeddingResponse(
            generation_request, format, False, self._api.backend, self._api.metrics, self._api.lifecycle
        )

    async def _encode(self, body: EmbeddingBody) -> list[list[int]]:
        """Token ids of the inputs; raises an InvalidRequest about ``input``."""
        add_special_tokens, truncate_to = body.add_special_tokens is not False, body.truncate_prompt_tokens
        try:
            inputs = await self._api.encode_truncated(
                body.model, body.inputs(), add_special_tokens, truncate_to, output_tokens=1
            )
            for tokens in inputs:
                check_request(self._api.backend.info, body.model, tokens, EMBEDDING_SAMPLING)
        except InvalidRequest as error:
            message = str(error).replace("the prompt", "an input").replace("prompt token", "token")
            raise InvalidRequest(message, "input", error.code) from error
        return inputs


class EmbeddingResponse(GenerationResponse):
    """Embeds the prompts of a request in batches, and sends all vectors at once."""

    async def _run(self, send: Send) -> None:
        prompts = self._request.prompts
        outputs: list[Output] = []
        for start in range(0, len(prompts), _INPUTS_AT_ONCE):
            batch = replace(self._request, prompts=prompts[start : start + _INPUTS_AT_ONCE])
            async with submit_request(self._backend, batch, self._metrics) as generation:
                self._context.count_tokens(generation.usage().prompt_tokens, 0)
                self._context.timelines += generation.timelines
                outputs += await collect(generation)
                self._context.load_ns += generation.load_ns
        count = sum(map(len, prompts))
        usage = Usage(count, 0, count, PromptTokensDetails(0))
        await self._send_body(send, await to_thread.run_sync(self._format.full, outputs, usage))


class EmbeddingFormat:
    """Writes embeddings, which are never streamed."""

    def __init__(self, model: str, as_base64: bool) -> None:
        self._model = model
        self._as_base64 = as_base64

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        return iter(())

    def usage_chunk(self, usage: Usage) -> bytes | None:
        return None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """A response with one vector for each output."""
        data = [encoded(Embedding(index, self._vector(output))) for index, output in enumerate(outputs)]
        counts = EmbeddingUsage(usage.prompt_tokens, usage.total_tokens)
        return encode(EmbeddingList(data, self._model, counts))

    def _vector(self, output: Output) -> list[float] | str:
        vector = output.embedding or b""
        return base64.b64encode(vector).decode() if self._as_base64 else list(read_embedding(vector))
