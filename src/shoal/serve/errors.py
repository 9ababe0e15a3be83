"""Every error as OpenAI shapes it: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shoal.core import EngineDied, InvalidRequest, QueueFull, ShoalError
from shoal.serve.responses import ErrorBody, ErrorResponse, encode

MODEL_NOT_FOUND = "model_not_found"
_INTERNAL = ErrorBody(
    "internal error; the server's log has the details", "server_error", None, "internal_error"
)
_LONGEST_MESSAGE = 1000
_log = logging.getLogger(__name__)


class ShuttingDown(ShoalError):
    """The server drains: requests in progress go on, new ones are turned away (HTTP 503)."""


class EngineSilent(ShoalError):
    """The engine has given no sign of life for some time, and may do so again (HTTP 503)."""


class BodyTooLarge(ShoalError):
    """A request body is larger than the server reads (HTTP 413)."""


class WrongContentType(ShoalError):
    """A request body is not JSON (HTTP 415)."""


class HostNotAllowed(ShoalError):
    """A request is meant for another host (HTTP 403)."""


class RequestTimeout(ShoalError):
    """A request did not arrive in time (HTTP 408)."""


class TooManyConnections(ShoalError):
    """No connection more can be served (HTTP 503)."""


class GenerationFailed(ShoalError):
    """The engine gave up on one request (HTTP 500)."""


def shorten(text: str, longest: int) -> str:
    """``text``, cut where it is longer than ``longest`` characters, and without halves of characters."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return cut.encode(errors="replace").decode()


def classify(error: BaseException) -> tuple[int, ErrorBody, dict[str, str]]:
    """HTTP status, body and headers for an error; anything unexpected is logged and becomes a 500."""
    match error:
        case InvalidRequest():
            status = 404 if error.code == MODEL_NOT_FOUND else 400
            # It may repeat what a client sent, which may be megabytes.
            message = shorten(str(error), _LONGEST_MESSAGE)
            return status, ErrorBody(message, "invalid_request_error", error.param, error.code), {}
        case QueueFull():
            body = ErrorBody(str(error), "rate_limit_error", None, "queue_full")
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
    """The answer for an error."""
    status, body, headers = classify(error)
    return Response(encode(ErrorResponse(body)), status, headers, "application/json")


def error_payload(error: BaseException) -> bytes:
    """The JSON of an error that happens when a stream has begun."""
    return encode(ErrorResponse(classify(error)[1]))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of ``app``, also the framework's own, in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def nobody_listens(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def unexpected(_: Request, __: Exception) -> Response:
        # The framework raises the error again after this answer, and the web server logs it.
        return Response(encode(ErrorResponse(_INTERNAL)), 500, media_type="application/json")

    app.add_exception_handler(ShoalError, answer)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(ClientDisconnect, nobody_listens)
    app.add_exception_handler(Exception, unexpected)
