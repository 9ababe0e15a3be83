"""What can go wrong with an HTTP request; ``http/error_answers.py`` makes answers of these exceptions."""

from shoal.core import ShoalError

MODEL_NOT_FOUND = "model_not_found"
RESPONSE_NOT_FOUND = "response_not_found"
ENGINE_NOT_FOUND = "engine_not_found"
OPERATION_NOT_FOUND = "operation_not_found"


class ShuttingDown(ShoalError):
    """The server drains: running requests continue, new ones are rejected (HTTP 503)."""


class BodyTooLarge(ShoalError):
    """A request body is larger than the server reads (HTTP 413)."""


class WrongContentType(ShoalError):
    """A request body is not JSON (HTTP 415)."""


class ContentEncoded(ShoalError):
    """A request body is compressed, or encoded otherwise (HTTP 415)."""


class UnknownTransferCoding(ShoalError):
    """A request body is sent with a transfer coding other than chunked (HTTP 501)."""


class AdminKeyNeeded(ShoalError):
    """A request for an operator's route has no admin key, or a wrong one (HTTP 401)."""


class NotForThisClient(ShoalError):
    """A client may not use an operator's route (HTTP 403)."""


class Conflict(ShoalError):
    """An operator asks for a name that is taken, or for something that is being changed (HTTP 409)."""


class HostNotAllowed(ShoalError):
    """The Host header of a request names another host (HTTP 403)."""


class InvalidApiKey(ShoalError):
    """A request has no API key, or one that the server does not know (HTTP 401)."""


class ServiceNotAllowed(ShoalError):
    """The API key of a request may not use its service (HTTP 403)."""


class RateLimited(ShoalError):
    """The API key of a request has used up its rate (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it can be tried again."""


class RequestTimeout(ShoalError):
    """A request did not arrive in time (HTTP 408)."""


class TooManyConnections(ShoalError):
    """The server has as many connections as it may have (HTTP 503)."""


class GenerationFailed(ShoalError):
    """The engine ended a request with an error (HTTP 500)."""
