"""The endpoints of Ollama's API (/api/...): requests are translated to OpenAI's API, and responses back."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.serve.api import Api, add_get
from shoal.serve.body_parsing import Body
from shoal.serve.http.error_responses import OLLAMA_PREFIX
from shoal.serve.http.request_context import context_of
from shoal.serve.ollama.formats import (
    JSON_LINES,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaFormat,
    OllamaWriter,
    WrapMessage,
    wrap_chat,
    wrap_generate,
)
from shoal.serve.ollama.models import LATEST, OllamaModels
from shoal.serve.ollama.operations import FollowUpResponse, OllamaOperations
from shoal.serve.ollama.request_bodies import (
    FIELD_NAMES,
    NamedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    PullBody,
    ShowBody,
)
from shoal.serve.openai.embedding_endpoints import EmbeddingEndpoints
from shoal.serve.openai.error_field_names import client_field_names
from shoal.serve.openai.generation_endpoints import GenerationEndpoints
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody
from shoal.serve.openai.response_bodies import encode
from shoal.serve.openai.response_formats import Format
from shoal.serve.openai.token_and_embedding_bodies import EmbeddingBody

# Clients check it for features: 0.6.4 (capabilities in /api/show, for Copilot), 0.9 (think), 0.11 (levels of
# think), 0.12.10 (call ids), which are all supported. Log-probabilities (0.12.11) are not.
_OLLAMA_VERSION = "0.12.10"
_Endpoint = Callable[..., Awaitable[Response]]


class OllamaEndpoints:
    """Ollama's API, except for creating, copying and publishing models."""

    def __init__(
        self,
        api: Api,
        generation: GenerationEndpoints,
        embedding: EmbeddingEndpoints,
        operations: OllamaOperations,
    ) -> None:
        self._api = api
        self._generation = generation
        self._embedding = embedding
        self._operations = operations
        self._models = OllamaModels(api)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; Ollama documents them, so the OpenAPI document leaves them out."""
        posts: dict[str, _Endpoint] = {
            "chat": self.chat,
            "generate": self.generate,
            "embed": self.embed,
            "embeddings": self.embeddings,
            "show": self.show,
            "pull": self.pull,
        }
        for name, endpoint in posts.items():
            app.post(f"{OLLAMA_PREFIX}{name}", include_in_schema=False)(endpoint)
        gets: dict[str, _Endpoint] = {"tags": self.tags, "ps": self.ps, "version": self.version}
        for name, read in gets.items():
            add_get(app, f"{OLLAMA_PREFIX}{name}", read, include_in_schema=False)
        app.delete(f"{OLLAMA_PREFIX}delete", include_in_schema=False)(self.delete)

    async def chat(self, request: Request) -> Response:
        """Write the next message of a chat."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaChatBody)
        return await self._answer(request, body, body.as_chat, ChatBody, arrival_ns, wrap_chat)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or continue it if it is raw or the service has no chat template."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaGenerateBody)
        if body.raw or not self._api.tokenizer(body.model).has_chat_template:
            return await self._answer(
                request, body, body.as_completion, CompletionBody, arrival_ns, wrap_generate
            )
        return await self._answer(request, body, body.as_chat, ChatBody, arrival_ns, wrap_generate)

    async def _answer(
        self,
        request: Request,
        body: OllamaChatBody | OllamaGenerateBody,
        translate: Callable[[], dict[str, Any]],
        body_type: type[ChatBody] | type[CompletionBody],
        arrival_ns: int,
        wrap: WrapMessage,
    ) -> Response:
        """Generate for ``body``, or load its model if the body is empty."""
        writer = OllamaWriter(body.model, context_of(request.scope), wrap)
        keep_alive_s = self._operations.keep_alive_s(request, body.keep_alive_s())
        if body.is_empty():
            unloads = await self._load(body.model, keep_alive_s)
            return _json(writer.line({}, done=True) | {"done_reason": "unload" if unloads else "load"})
        with client_field_names(FIELD_NAMES):
            fields = await self._api.parse(encode(translate()), body_type)
            if isinstance(fields, ChatBody):
                response = await self._generation.chat(request, fields, arrival_ns)
            else:
                response = await self._generation.complete(request, fields, arrival_ns, whole_context=True)
        response.translate(lambda format: OllamaFormat(format, writer), JSON_LINES, FIELD_NAMES)
        return self._with_keep_alive(response, body.model, keep_alive_s)

    async def _load(self, service: str, keep_alive_s: float | None) -> bool:
        """Load a service, or unload it with a keep_alive of 0; returns whether it was unloaded."""
        unloads = keep_alive_s == 0
        if not unloads:
            await self._operations.load(service)
        if keep_alive_s is not None:
            await self._operations.keep(service, keep_alive_s)
        return unloads

    def _with_keep_alive(self, response: Response, service: str, keep_alive_s: float | None) -> Response:
        """``response``; when it is sent, the idle time of the service is set to ``keep_alive_s``."""
        if keep_alive_s is None:
            return response
        return FollowUpResponse(response, partial(self._operations.keep, service, keep_alive_s))

    async def embed(self, request: Request) -> Response:
        """Embed one text or several; without a text, only load the model."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbedBody)
        keep_alive_s = self._operations.keep_alive_s(request, body.keep_alive_s())
        if not body.input:
            await self._load(body.model, keep_alive_s)
            return _json({"model": body.model, "embeddings": []})
        return await self._embed(
            request,
            body,
            keep_alive_s,
            arrival_ns,
            lambda _: OllamaEmbeddings(body.model, context_of(request.scope)),
        )

    async def embeddings(self, request: Request) -> Response:
        """Embed one text; the older endpoint."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbeddingsBody)
        keep_alive_s = self._operations.keep_alive_s(request, body.keep_alive_s())
        if not body.prompt:
            await self._load(body.model, keep_alive_s)
            return _json({"embedding": []})
        return await self._embed(request, body, keep_alive_s, arrival_ns, lambda _: OllamaEmbedding())

    async def _embed(
        self,
        request: Request,
        body: OllamaEmbedBody | OllamaEmbeddingsBody,
        keep_alive_s: float | None,
        arrival_ns: int,
        format: Callable[[Format], Format],
    ) -> Response:
        fields = await self._api.parse(encode(body.as_embedding()), EmbeddingBody)
        response = await self._embedding.embed(request, fields, arrival_ns)
        response.translate(format, JSON_LINES, {})
        return self._with_keep_alive(response, body.model, keep_alive_s)

    async def tags(self, request: Request) -> Response:
        return _json({"models": self._models.list_all(request)})

    async def ps(self, request: Request) -> Response:
        return _json({"models": self._models.list_loaded(request)})

    async def show(self, request: Request) -> Response:
        body = await self._body(request, ShowBody)
        return _json(self._models.show(self._api.card(request, body.model, "model")))

    async def version(self) -> Response:
        """The version of Ollama that this API is compatible with."""
        return _json({"version": _OLLAMA_VERSION})

    async def pull(self, request: Request) -> Response:
        """Download another model, and serve it."""
        return await self._operations.pull(await self._api.body(request, PullBody))

    async def delete(self, request: Request) -> Response:
        body = await self._body(request, NamedBody)
        await self._operations.remove(body.model)
        return Response()

    async def _body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, with the service's name as model; raises an InvalidRequest (404)."""
        body = await self._api.body(request, body_type)
        name, services = body.model, self._api.services
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        if name not in services and other in services:
            name = other
        self._api.card(request, name, "model")
        return body.model_copy(update={"model": name})


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")
