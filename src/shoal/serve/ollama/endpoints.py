"""Ollama's API, translated: its requests become OpenAI's, and OpenAI's answers become its own."""

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

# Clients compare it with what they need: 0.6.4 (capabilities in /api/show, for Copilot), 0.9 (think), 0.11
# (its levels), 0.12.10 (ids of calls). All of that is here; log-probabilities, which came with 0.12.11, are
# not: raise it when they are. GET /version has the version of Shoal.
_OLLAMA_VERSION = "0.12.10"
_Endpoint = Callable[..., Awaitable[Response]]


class OllamaEndpoints:
    """Ollama's API, without what makes models of files that clients send, and publishes them."""

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
        """Answer a prompt, or continue it where there is no chat template or it is raw."""
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
        place: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> Response:
        """Generate for ``body``; ``place`` says where a message stands in an answer."""
        translated = OllamaWriter(body.model, context_of(request.scope), place)
        kept_s = self._operations.kept_s(request, body.kept_s())
        if body.is_empty():
            unloads = await self._load(body.model, kept_s)
            return _json(translated.line({}, done=True) | {"done_reason": "unload" if unloads else "load"})
        with client_field_names(FIELD_NAMES):
            fields = await self._api.parse(encode(translate()), body_type)
            if isinstance(fields, ChatBody):
                response = await self._generation.chat(request, fields, arrival_ns)
            else:
                response = await self._generation.complete(request, fields, arrival_ns, whole_context=True)
        response.translate(lambda format: OllamaFormat(format, translated), JSON_LINES, FIELD_NAMES)
        return self._kept(response, body.model, kept_s)

    async def _load(self, service: str, kept_s: float | None) -> bool:
        """Load a service that a request asks nothing of, or unload it; returns whether it did that."""
        unloads = kept_s == 0
        if not unloads:
            await self._operations.load(service)
        if kept_s is not None:
            await self._operations.keep(service, kept_s)
        return unloads

    def _kept(self, response: Response, service: str, kept_s: float | None) -> Response:
        """``response``, after which the service is to be unloaded when it had no request for so long."""
        if kept_s is None:
            return response
        return FollowUpResponse(response, partial(self._operations.keep, service, kept_s))

    async def embed(self, request: Request) -> Response:
        """Embed one text or several; no text asks only that the model is loaded."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbedBody)
        kept_s = self._operations.kept_s(request, body.kept_s())
        if not body.input:
            await self._load(body.model, kept_s)
            return _json({"model": body.model, "embeddings": []})
        return await self._embed(
            request,
            body,
            kept_s,
            arrival_ns,
            lambda _: OllamaEmbeddings(body.model, context_of(request.scope)),
        )

    async def embeddings(self, request: Request) -> Response:
        """Embed one text, as Ollama's older clients ask for it."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbeddingsBody)
        kept_s = self._operations.kept_s(request, body.kept_s())
        if not body.prompt:
            await self._load(body.model, kept_s)
            return _json({"embedding": []})
        return await self._embed(request, body, kept_s, arrival_ns, lambda _: OllamaEmbedding())

    async def _embed(
        self,
        request: Request,
        body: OllamaEmbedBody | OllamaEmbeddingsBody,
        kept_s: float | None,
        arrival_ns: int,
        format: Callable[[Format], Format],
    ) -> Response:
        fields = await self._api.parse(encode(body.as_embedding()), EmbeddingBody)
        response = await self._embedding.embed(request, fields, arrival_ns)
        response.translate(format, JSON_LINES, {})
        return self._kept(response, body.model, kept_s)

    async def tags(self, request: Request) -> Response:
        """The services."""
        return _json({"models": self._models.listed(request)})

    async def ps(self, request: Request) -> Response:
        """The services that are loaded."""
        return _json({"models": self._models.loaded(request)})

    async def show(self, request: Request) -> Response:
        """What is known of a service."""
        body = await self._body(request, ShowBody)
        return _json(self._models.shown(self._api.card(request, body.model, "model")))

    async def version(self) -> Response:
        """The version of Ollama that this is like."""
        return _json({"version": _OLLAMA_VERSION})

    async def pull(self, request: Request) -> Response:
        """Serve another model."""
        return await self._operations.pull(await self._api.body(request, PullBody))

    async def delete(self, request: Request) -> Response:
        """Remove a service."""
        body = await self._body(request, NamedBody)
        await self._operations.remove(body.model)
        return Response()

    async def _body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, whose model is the name of a service; raises an InvalidRequest (404)."""
        body = await self._api.body(request, body_type)
        name, services = body.model, self._api.services
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        if name not in services and other in services:
            name = other
        self._api.card(request, name, "model")
        return body.model_copy(update={"model": name})


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")
