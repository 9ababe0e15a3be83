"""Maps errors to HTTP statuses, error codes and bodies, in the shape of the requested API."""

import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.core import (
    EngineDied,
    InvalidRequest,
    QueueFull,
    ServiceUnavailable,
    ShoalError,
    SLOExpired,
)
from shoal.serve.errors import (
    AdminAccessDenied,
    AdminKeyRequired,
    BodyEncoded,
    BodyTooLarge,
    Conflict,
    GenerationFailed,
    HostNotAllowed,
    InvalidApiKey,
    RateLimited,
    RequestTimeout,
    ServiceNotAllowed,
    ShuttingDown,
    TooManyConnections,
    UnknownTransferCoding,
    UnsupportedContentType,
)
from shoal.serve.http.message_errors import NOT_FOUND, encode_message_error, is_messages_path
from shoal.serve.http.request_context import REQUEST_ID, context_of
from shoal.serve.http.route_hints import route_hint
from shoal.serve.openai.response_bodies import ErrorBody, ErrorResponse, encode

OLLAMA_PREFIX = "/api/"
"""Paths of Ollama's API."""
_INTERNAL = ErrorBody(
    "internal error; the server's log has the details", "server_error", None, "internal_error"
)
_MAX_MESSAGE_CHARACTERS = 1000
_log = logging.getLogger(__name__)


def shorten(text: str, max_characters: int) -> str:
    """``text`` cut to at most ``max_characters``; lone surrogates are replaced."""
    shortened = text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."
    return shortened.encode(errors="replace").decode()


def classify(error: BaseException) -> tuple[int, ErrorBody, dict[str, str]]:
    """HTTP status, body and headers of an error; an unexpected error is logged and becomes a 500."""
    match error:
        case InvalidRequest():
            status = 404 if error.code in NOT_FOUND else 400
            # The message may quote client input of megabytes.
            message = shorten(str(error), _MAX_MESSAGE_CHARACTERS)
            return status, ErrorBody(message, "invalid_request_error", error.param, error.code), {}
        case QueueFull():
            code = "goals_out_of_reach" if isinstance(error, SLOExpired) else "queue_full"
            body = ErrorBody(str(error), "rate_limit_error", None, code)
            return 429, body, _retry_after(error.retry_after_s)
        case RateLimited():
            body = ErrorBody(str(error), "rate_limit_error", None, "rate_limit_exceeded")
            return 429, body, _retry_after(error.retry_after_s)
        case InvalidApiKey():
            body = ErrorBody(str(error), "invalid_request_error", None, "invalid_api_key")
            return 401, body, {"WWW-Authenticate": "Bearer"}
        case AdminKeyRequired():
            body = ErrorBody(str(error), "invalid_request_error", None, "invalid_admin_key")
            return 401, body, {"WWW-Authenticate": "Bearer"}
        case AdminAccessDenied():
            return 403, ErrorBody(str(error), "invalid_request_error", None, "admin_only"), {}
        case Conflict():
            return 409, ErrorBody(str(error), "invalid_request_error", None, "conflict"), {}
        case ServiceNotAllowed():
            return 403, ErrorBody(str(error), "invalid_request_error", "model", "model_not_allowed"), {}
        case ServiceUnavailable():
            body = ErrorBody(str(error), "server_error", None, "service_unavailable")
            return 503, body, _retry_after(error.retry_after_s)
        case EngineDied():
            # Otherwise OpenAI's clients would retry, and the request would crash another engine.
            headers = {"x-should-retry": "false"}
            return 500, ErrorBody(str(error), "server_error", None, "engine_died"), headers
        case ShuttingDown():
            return 503, ErrorBody(str(error), "server_error", None, "shutting_down"), {"Connection": "close"}
        case BodyTooLarge():
            return 413, ErrorBody(str(error), "invalid_request_error", None, "body_too_large"), {}
        case UnsupportedContentType():
            return 415, ErrorBody(str(error), "invalid_request_error", None, "unsupported_media_type"), {}
        case BodyEncoded():
            body = ErrorBody(str(error), "invalid_request_error", None, "unsupported_media_type")
            return 415, body, {"Accept-Encoding": "identity"}
        case UnknownTransferCoding():
            body = ErrorBody(str(error), "invalid_request_error", None, "unknown_transfer_coding")
            return 501, body, {}
        case HostNotAllowed():
            return 403, ErrorBody(str(error), "invalid_request_error", None, "host_not_allowed"), {}
        case RequestTimeout():
            return 408, ErrorBody(str(error), "invalid_request_error", None, "request_timeout"), {}
        case TooManyConnections():
            return 503, ErrorBody(str(error), "server_error", None, "too_many_connections"), {}
        case GenerationFailed():
            return 500, ErrorBody(str(error), "server_error", None, "generation_failed"), {}
        case HTTPException():
            headers = dict(error.headers or {})
            if "Allow" in headers:
                headers["Allow"] = _allowed(headers["Allow"])
            return error.status_code, ErrorBody(*_routing_error(error, headers)), headers
    _log.error("request failed", exc_info=error)
    return 500, _INTERNAL, {}


def _allowed(methods: str) -> str:
    """All methods of a route, sorted; the framework leaves out HEAD and OPTIONS."""
    names = set(methods.split(", "))
    return ", ".join([*sorted(names | {"HEAD"} if "GET" in names else names), "OPTIONS"])


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}


def _routing_error(error: HTTPException, headers: Mapping[str, str]) -> tuple[str, str, None, str]:
    if error.status_code == 404:
        return f"no such route; {error.detail}", "invalid_request_error", None, "unknown_url"
    if error.status_code == 405:
        return (
            f"method not allowed; allowed: {headers.get('Allow', '')}",
            "invalid_request_error",
            None,
            "method_not_allowed",
        )
    return str(error.detail), "invalid_request_error", None, "http_error"


class _ErrorResponse(Response):
    """The response for an error, in the shape of the requested API; also noted in the request context."""

    def __init__(self, error: BaseException) -> None:
        status, self._body, headers = classify(error)
        super().__init__(encode(ErrorResponse(self._body)), status, headers, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context_of(scope).why = self._body.message
        self.body = _encode_for_api(self._body, scope)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: BaseException) -> Response:
    return _ErrorResponse(error)


def error_payload(error: BaseException, scope: Scope) -> bytes:
    """The JSON of an error event, for a stream that has started."""
    return _encode_for_api(classify(error)[1], scope)


def _encode_for_api(body: ErrorBody, scope: Scope) -> bytes:
    """The JSON of an error, in the shape of the requested API."""
    path = scope["path"]
    if is_messages_path(path):
        return encode_message_error(body, context_of(scope).id)
    is_ollama = path.startswith(OLLAMA_PREFIX)
    return encode({"error": body.message} if is_ollama else ErrorResponse(body))


def install_error_handlers(app: FastAPI) -> None:
    """Handle all errors of ``app``, also those of the framework."""

    async def respond(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def route_missing(request: Request, _: Exception) -> Response:
        routes = [route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path]
        return error_response(HTTPException(404, route_hint(request.url.path, routes)))

    async def method_not_allowed(request: Request, error: Exception) -> Response:
        if request.method == "OPTIONS" and isinstance(error, HTTPException):
            return Response(status_code=204, headers={"Allow": _allowed((error.headers or {})["Allow"])})
        return error_response(error)

    async def client_disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def unexpected(request: Request, _: Exception) -> Response:
        # The framework raises the error again after this response, and the web server logs it. The response
        # does not pass through the middleware.
        headers = {REQUEST_ID: context_of(request.scope).id}
        return Response(encode(ErrorResponse(_INTERNAL)), 500, headers, "application/json")

    app.add_exception_handler(ShoalError, respond)
    app.add_exception_handler(HTTPException, respond)
    app.add_exception_handler(404, route_missing)
    app.add_exception_handler(405, method_not_allowed)
    app.add_exception_handler(ClientDisconnect, client_disconnected)
    app.add_exception_handler(Exception, unexpected)
