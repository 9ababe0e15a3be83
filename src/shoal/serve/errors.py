"""All errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shoal.core import EngineDied, GoalsOutOfReach, InvalidRequest, QueueFull, ShoalError
from shoal.serve.responses import ErrorBody, ErrorResponse, encode

MODEL_NOT_FOUND = "model_not_found"
RESPONSE_NOT_FOUND = "response_not_found"
_INTERNAL = ErrorBody(
    "internal error; the server's log has the details", "server_error", None, "internal_error"
)
_MAX_MESSAGE_CHARACTERS = 1000
_log = logging.getLogger(__name__)


class ShuttingDown(ShoalError):
    """The server drains: running requests continue, new ones are rejected (HTTP 503)."""


class EngineSilent(ShoalError):
    """The engine has not responded for some time, but may do so again (HTTP 503)."""


class BodyTooLarge(ShoalError):
    """A request body is larger than the server reads (HTTP 413)."""


class WrongContentType(ShoalError):
    """A request body is not JSON (HTTP 415)."""


class HostNotAllowed(ShoalError):
    """The Host header of a request names another host (HTTP 403)."""


class RequestTimeout(ShoalError):
    """A request did not arrive in time (HTTP 408)."""


class TooManyConnections(ShoalError):
    """The server has as many connections as it may have (HTTP 503)."""


class GenerationFailed(ShoalError):
    """The engine ended a request with an error (HTTP 500)."""


def shorten(text: str, max_characters: int) -> str:
    """``text`` cut to at most ``max_characters``; lone surrogates are replaced."""
    shortened = text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."
    return shortened.encode(errors="replace").decode()


def classify(error: BaseException) -> tuple[int, ErrorBody, dict[str, str]]:
    """HTTP status, body and headers of an error; an unexpected one is logged and becomes a 500."""
    match error:
        case InvalidRequest():
            status = 404 if error.code in (MODEL_NOT_FOUND, RESPONSE_NOT_FOUND) else 400
            # It may quote what a client sent, which may be megabytes.
            message = shorten(str(error), _MAX_MESSAGE_CHARACTERS)
            return status, ErrorBody(message, "invalid_request_error", error.param, error.code), {}
        case QueueFull():
            code = "goals_out_of_reach" if isinstance(error, GoalsOutOfReach) else "queue_full"
            body = ErrorBody(str(error), "rate_limit_error", None, code)
            return 429, body, {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        case EngineDied():
            return 503, ErrorBody(str(error), "server_error", None, "engine_died"), {}
        case EngineSilent():
            return 503, ErrorBody(str(error), "server_error", None, "degraded"), {}
        case ShuttingDown():
            return 503, ErrorBody(str(error), "server_error", None, "shutting_down"), {"Connection": "close"}
        case BodyTooLarge():
            return 413, ErrorBody(str(error), "invalid_request_error", None, "body_too_large"), {}
        case WrongContentType():
            return 415, ErrorBody(str(error), "invalid_request_error", None, "unsupported_media_type"), {}
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
            if headers.get("Allow") == "GET":
                headers["Allow"] = "GET, HEAD"
            return error.status_code, ErrorBody(*_routing_error(error, headers)), headers
    _log.error("request failed", exc_info=error)
    return 500, _INTERNAL, {}


def _routing_error(error: HTTPException, headers: Mapping[str, str]) -> tuple[str, str, None, str]:
    if error.status_code == 404:
        return "no such route; GET /openapi.json lists them", "invalid_request_error", None, "unknown_url"
    if error.status_code == 405:
        return (
            f"method not allowed; allowed: {headers.get('Allow', '')}",
            "invalid_request_error",
            None,
            "method_not_allowed",
        )
    return str(error.detail), "invalid_request_error", None, "http_error"


def error_response(error: BaseException) -> Response:
    """The response for an error."""
    status, body, headers = classify(error)
    return Response(encode(ErrorResponse(body)), status, headers, "application/json")


def error_payload(error: BaseException) -> bytes:
    """The JSON of an error after a stream has started."""
    return encode(ErrorResponse(classify(error)[1]))


def install_error_handlers(app: FastAPI) -> None:
    """Respond to every error of ``app``, also the framework's own, in OpenAI's shape."""

    async def respond(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def client_disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def unexpected(_: Request, __: Exception) -> Response:
        # The framework raises the error again after this response, and the web server logs it.
        return Response(encode(ErrorResponse(_INTERNAL)), 500, media_type="application/json")

    app.add_exception_handler(ShoalError, respond)
    app.add_exception_handler(HTTPException, respond)
    app.add_exception_handler(ClientDisconnect, client_disconnected)
    app.add_exception_handler(Exception, unexpected)
