"""Ollama's API, translated: its requests become OpenAI's, and OpenAI's answers become its own."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.engine.reader import Delta
from shoal.serve.api import Api
from shoal.serve.bodies import ChatBody, CompletionBody
from shoal.serve.embedding_endpoints import EmbeddingEndpoints
from shoal.serve.errors import OLLAMA_PREFIX
from shoal.serve.exchange import Exchange, exchange_of
from shoal.serve.field_names import errors_named
from shoal.serve.formats import Format, Output
from shoal.serve.further_bodies import EmbeddingBody
from shoal.serve.generation_endpoints import GenerationEndpoints
from shoal.serve.generation_response import Framing
from shoal.serve.ollama_bodies import (
    FIELD_NAMES,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ShowBody,
)
from shoal.serve.parse import Body
from shoal.serve.responses import ModelCard, Usage, encode

_LATEST = ":latest"
# Clients compare it with what they need: 0.6.4 (capabilities in /api/show, for Copilot), 0.9 (think), 0.11 (its
# levels), 0.12.10 (ids of calls). All of that is here; log-probabilities, which came with 0.12.11, are not:
# raise it when they are. GET /version has the version of Shoal.
_OLLAMA_VERSION = "0.12.10"
_JSON_LINES = Framing(
    lambda payload: payload + b"\n", end=b"", media_type=b"application/x-ndjson", comment=b""
)
_Endpoint = Callable[..., Awaitable[Response]]


class OllamaEndpoints:
    """The part of Ollama's API that concerns models that are there; the rest is unknown here."""

    def __init__(self, api: Api, generation: GenerationEndpoints, embedding: EmbeddingEndpoints) -> None:
        self._api = api
        self._generation = generation
        self._embedding = embedding

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; Ollama documents them, so the OpenAPI document leaves them out."""
        posts: dict[str, _Endpoint] = {
            "chat": self.chat,
            "generate": self.generate,
            "embed": self.embed,
            "embeddings": self.embeddings,
            "show": self.show,
        }
        for name, endpoint in posts.items():
            app.post(f"{OLLAMA_PREFIX}{name}", include_in_schema=False)(endpoint)
        gets: dict[str, _Endpoint] = {"tags": self.tags, "ps": self.tags, "version": self.version}
        for name, read in gets.items():
            app.api_route(f"{OLLAMA_PREFIX}{name}", methods=["GET", "HEAD"], include_in_schema=False)(read)

    async def chat(self, request: Request) -> Response:
        """Write the next message of a chat."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaChatBody)
        return await self._answer(request, body, body.as_chat, ChatBody, arrival_ns, _in_message)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or continue it where there is no chat template or it is raw."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaGenerateBody)
        if body.raw or not self._api.tokenizer(body.model).has_chat_template:
            return await self._answer(
                request, body, body.as_completion, CompletionBody, arrival_ns, _in_response
            )
        return await self._answer(request, body, body.as_chat, ChatBody, arrival_ns, _in_response)

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
        translated = Translation(body.model, exchange_of(request.scope), place)
        if body.is_empty():
            return _json(translated.line({}, done=True) | {"done_reason": "load"})
        with errors_named(FIELD_NAMES):
            fields = await self._api.parse(encode(translate()), body_type)
            if isinstance(fields, ChatBody):
                response = await self._generation.chat(request, fields, arrival_ns)
            else:
                response = await self._generation.complete(request, fields, arrival_ns, whole_context=True)
        response.rewrite(lambda format: OllamaFormat(format, translated), _JSON_LINES, FIELD_NAMES)
        return response

    async def embed(self, request: Request) -> Response:
        """Embed one text or several; no text asks whether the model is there."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbedBody)
        if not body.input:
            return _json({"model": body.model, "embeddings": []})
        fields = await self._api.parse(encode(body.as_embedding()), EmbeddingBody)
        response = await self._embedding.embed(request, fields, arrival_ns)
        response.rewrite(lambda format: OllamaEmbeddings(format, body.model, arrival_ns), _JSON_LINES, {})
        return response

    async def embeddings(self, request: Request) -> Response:
        """Embed one text, as Ollama's older clients ask for it."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, OllamaEmbeddingsBody)
        if not body.prompt:
            return _json({"embedding": []})
        fields = await self._api.parse(encode(body.as_embedding()), EmbeddingBody)
        response = await self._embedding.embed(request, fields, arrival_ns)
        response.rewrite(OllamaEmbedding, _JSON_LINES, {})
        return response

    async def tags(self, request: Request) -> Response:
        """The services; all of them are loaded."""
        cards = self._api.visible_cards(request).values()
        return _json({"models": [self._model(card) for card in cards]})

    async def show(self, request: Request) -> Response:
        """What is known of a service."""
        body = await self._body(request, ShowBody)
        card = self._api.card(request, body.model, "model")
        tokenizer = self._api.tokenizer(card.id)
        shown = self._model(card) | {
            "model_info": {"general.architecture": "shoal", "shoal.context_length": card.max_model_len},
            "capabilities": ["completion", "tools"] if tokenizer.has_chat_template else ["completion"],
        }
        if tokenizer.has_chat_template:
            shown["template"] = tokenizer.chat_template.source
        return _json(shown)

    async def version(self) -> Response:
        """The version of Ollama that this is like."""
        return _json({"version": _OLLAMA_VERSION})

    async def _body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, whose model is the name of a service; raises an InvalidRequest (404)."""
        body = await self._api.body(request, body_type)
        name, services = body.model, self._api.services
        other = name.removesuffix(_LATEST) if name.endswith(_LATEST) else name + _LATEST
        if name not in services and other in services:
            name = other
        self._api.card(request, name, "model")
        return body.model_copy(update={"model": name})

    def _model(self, card: ModelCard) -> dict[str, Any]:
        latest = card.id + _LATEST
        name = card.id if ":" in card.id or latest in self._api.services else latest
        return {
            "name": name,
            "model": name,
            "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
            # Clients show the first digits; here they tell models apart and say nothing of weights.
            "digest": hashlib.sha256(self._api.backend.info.services[card.id].model.encode()).hexdigest(),
            "size": 0,
            "details": {"parent_model": self._api.backend.info.services[card.id].model},
        }


class Translation:
    """Writes the objects of one answer. ``place`` says where a message stands in them."""

    def __init__(
        self, model: str, exchange: Exchange, place: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._place = place

    def line(self, message: dict[str, Any], done: bool) -> dict[str, Any]:
        """An object with an OpenAI message, or with what a chunk adds to one."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **self._place(_message(message)), "done": done}

    def last(self, message: dict[str, Any], reason: str, usage: Usage) -> dict[str, Any]:
        """The object that ends the answer, with counts, and durations in nanoseconds."""
        exchange = self._exchange
        total_ns = time.monotonic_ns() - exchange.arrival_ns
        first_ns = round((exchange.first_token_s or 0) * 1e9)
        return self.line(message, done=True) | {
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(0, first_ns - round((exchange.queue_s or 0) * 1e9)),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(0, total_ns - first_ns),
        }


class OllamaFormat:
    """Answers in Ollama's shapes, made of another format's; calls of tools come whole, after the text."""

    def __init__(self, openai: Format, translation: Translation) -> None:
        self._openai = openai
        self._translation = translation
        self._calls: dict[int, dict[str, Any]] = {}
        self._reason = "stop"

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """An object for every chunk that has text."""
        for chunk in self._openai.chunks(index, delta, usage):
            (choice,) = msgspec.json.decode(chunk)["choices"]
            message = choice.get("delta") or {"content": choice.get("text")}
            for call in message.get("tool_calls") or ():
                known = self._calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
                known["id"] = call.get("id") or known.get("id")
                _extend(known["function"], call["function"])
            if message.get("content") or message.get("reasoning_content"):
                text = {key: value for key, value in message.items() if key != "tool_calls"}
                yield encode(self._translation.line(text, done=False))
            if choice["finish_reason"]:
                self._reason = choice["finish_reason"]
                if self._calls:
                    calls = [call for _, call in sorted(self._calls.items())]
                    yield encode(self._translation.line({"tool_calls": calls}, done=False))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last object."""
        return encode(self._translation.last({}, self._reason, usage))

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The whole answer as one object."""
        (choice,) = msgspec.json.decode(self._openai.full(outputs, usage))["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        return encode(self._translation.last(message, choice["finish_reason"], usage))


class OllamaEmbedding:
    """One embedding in the shape of Ollama's older endpoint, made of that of another format."""

    def __init__(self, openai: Format) -> None:
        self._openai = openai

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """Nothing."""
        return iter(())

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """Nothing."""
        return None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The vector."""
        (vector,) = self._vectors(outputs, usage)
        return encode({"embedding": vector})

    def _vectors(self, outputs: Sequence[Output], usage: Usage) -> list[list[float]]:
        data = msgspec.json.decode(self._openai.full(outputs, usage))["data"]
        return [entry["embedding"] for entry in data]


class OllamaEmbeddings(OllamaEmbedding):
    """Embeddings of several texts."""

    def __init__(self, openai: Format, model: str, arrival_ns: int) -> None:
        super().__init__(openai)
        self._model = model
        self._arrival_ns = arrival_ns

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """A vector for each text, with counts and durations."""
        return encode(
            {
                "model": self._model,
                "embeddings": self._vectors(outputs, usage),
                "total_duration": time.monotonic_ns() - self._arrival_ns,
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
            }
        )


def _extend(call: dict[str, Any], piece: dict[str, Any]) -> None:
    for key in call:
        call[key] += piece.get(key) or ""


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI message, or a part of one, as Ollama has it."""
    translated: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if thinking := message.get("reasoning_content"):
        translated["thinking"] = thinking
    if calls := message.get("tool_calls"):
        translated["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return translated


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """A call, with an object as its arguments."""
    function = call["function"]
    return {
        "id": call["id"],
        "function": {"index": index, "name": function["name"], "arguments": _arguments(function)},
    }


def _arguments(function: dict[str, Any]) -> Any:
    """The arguments as an object; text that a model cut short is none."""
    try:
        return msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return {}


def _in_message(message: dict[str, Any]) -> dict[str, Any]:
    """Where /api/chat has a message."""
    return {"message": message}


def _in_response(message: dict[str, Any]) -> dict[str, Any]:
    """Where /api/generate has its text."""
    thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
    return {"response": message["content"], **thinking}


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")
