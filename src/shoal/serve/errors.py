"""Exceptions of the HTTP server; ``http/error_responses.py`` maps them to statuses and error codes."""

from shoal.core import ShoalError

MODEL_NOT_FOUND = "model_not_found"
RESPONSE_NOT_FOUND = "response_not_found"
ENGINE_NOT_FOUND = "engine_not_found"
OPERATION_NOT_FOUND = "operation_not_found"


class ShuttingDown(ShoalError):
    """The server drains: running requests continue, new requests are rejected (HTTP 503)."""


class BodyTooLarge(ShoalError):
    """A request body is larger than the limit (HTTP 413)."""


class UnsupportedContentType(ShoalError):
    """A request body is not JSON (HTTP 415)."""


class BodyEncoded(ShoalError):
    """A request body is compressed, or encoded otherwise (HTTP 415)."""


class UnknownTransferCoding(ShoalError):
    """A request body has a transfer coding other than chunked (HTTP 501)."""


class AdminKeyRequired(ShoalError):
    """A request for an operators' route has no admin key, or a wrong one (HTTP 401)."""


class AdminAccessDenied(ShoalError):
    """A client may not use an operators' route (HTTP 403)."""


class Conflict(ShoalError):
    """A name is taken, or the target of an operation is being changed by another (HTTP 409)."""


class HostNotAllowed(ShoalError):
    """The Host header of a request names another host (HTTP 403)."""


class InvalidApiKey(ShoalError):
    """A request has no API key, or an unknown one (HTTP 401)."""


class ServiceNotAllowed(ShoalError):
    """An API key may not use the requested service (HTTP 403)."""


class RateLimited(ShoalError):
    """An API key has reached its rate limit (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(ShoalError):
    """A request did not arrive completely in time (HTTP 408)."""


class TooManyConnections(ShoalError):
    """The connection limit is reached (HTTP 503)."""


class GenerationFailed(ShoalError):
    """The engine ended a request with an error (HTTP 500)."""
