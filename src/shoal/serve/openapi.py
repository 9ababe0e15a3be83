"""The OpenAPI document: FastAPI's routes, with the request and response types of this package."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from shoal.serve.admin import cluster_responses
from shoal.serve.http.api_keys import is_open
from shoal.serve.openai import response_bodies as responses
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody
from shoal.serve.openai.token_and_embedding_bodies import DetokenizeBody, EmbeddingBody, TokenizeBody
from shoal.serve.responses_api.request_body import ResponsesBody

_REF = "#/components/schemas/{name}"
_RESPONSE_TYPES = (
    responses.ErrorResponse,
    responses.Completion,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.ResponseObject,
    responses.ResponseEvent,
    responses.EmbeddingList,
    responses.Tokenized,
    responses.Detokenized,
    responses.ModelList,
    responses.ModelCard,
    cluster_responses.Health,
    cluster_responses.Fine,
    responses.Version,
)
_BODY_TYPES = (CompletionBody, ChatBody, ResponsesBody, EmbeddingBody, TokenizeBody, DetokenizeBody)
_ERRORS = {
    400: "The request cannot be served as asked; `param` names the field.",
    401: "No API key, or one that the server does not know.",
    403: "The API key may not use this model.",
    404: "No such model or route.",
    413: "The body is larger than the server reads.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests wait already, or this one waited too long for its latency goals; try again after"
    " `Retry-After` seconds.",
    500: "The engines failed on this request.",
    503: "No engine of the service runs, or the server is shutting down; try again later.",
}


def returns(body_type: type[msgspec.Struct], description: str) -> dict[int | str, dict[str, Any]]:
    """A 200 with a body of type ``body_type``."""
    return {
        200: {
            "description": description,
            "content": {"application/json": {"schema": _ref(body_type.__name__)}},
        }
    }


def fails(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route."""
    errors: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        errors[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref("ErrorResponse")}},
        }
        if status == 429:
            errors[status]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
    return errors


def streams(chunk_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The content of a 200 that is a stream of server-sent events, each with a ``chunk_type``."""
    chunk = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _ref(chunk_type.__name__),
    }
    data = {"anyOf": [{"const": "[DONE]"}, chunk]}
    event = {
        "type": "object",
        "description": "One event; the `data` of the last is `[DONE]`, that of a failure an ErrorResponse.",
        "properties": {"data": data},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": event}}


def takes(body: type) -> dict[str, Any]:
    """A required JSON body of type ``body``."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body.__name__)}}}
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def document(
    app: FastAPI,
    services: Sequence[str],
    chat_services: Sequence[str],
    needs_key: bool,
    unknown_fields: Literal["ignore", "refuse"],
) -> dict[str, Any]:
    """The document of ``app``.

    services, chat_services: values of ``model`` in bodies, and in bodies of chats. needs_key: whether clients
    must send an API key. unknown_fields: whether unknown fields of bodies are refused.
    """
    schema: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    _, bodies = models_json_schema(
        [(body, "validation") for body in _BODY_TYPES],
        ref_template="#/components/schemas/{model}",
    )
    _, response_schemas = msgspec.json.schema_components(_RESPONSE_TYPES, ref_template=_REF)
    if unknown_fields == "refuse":
        for body in bodies["$defs"].values():
            body["additionalProperties"] = False
    schemas = {**bodies["$defs"], **response_schemas}
    for body in _BODY_TYPES:
        names = chat_services if body in (ChatBody, ResponsesBody) and chat_services else services
        schemas[body.__name__]["properties"]["model"]["enum"] = list(names)
    schema["components"] = {"schemas": schemas}
    if needs_key:
        _require_key(schema)
    return schema


def _require_key(schema: dict[str, Any]) -> None:
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        if not is_open(path):
            for operation in operations.values():
                operation["security"] = [{"key": []}]
                operation["responses"].update({str(code): body for code, body in fails(401, 403).items()})
