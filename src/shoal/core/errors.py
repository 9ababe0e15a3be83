"""Errors that a person or a client can act on; each says what was asked for and what is possible."""


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose."""


class ConfigError(ShoalError):
    """A configuration file, flag or argument is wrong."""


class InvalidRequest(ShoalError):
    """A request can never be served as asked (HTTP 400, or 404 for an unknown model)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The wrong field, as the client wrote it."""
        self.code = code
        """A short machine-readable word, such as ``context_length_exceeded`` or ``model_not_found``."""


class QueueFull(ShoalError):
    """Too many requests are waiting to take another one (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When there is probably room again."""


class SLOExpired(QueueFull):
    """A request has waited until its latency goals can no longer be met (HTTP 429)."""


class ModelUnavailable(ShoalError):
    """A model's files cannot be found or fetched; the message says what to do."""


class ModelUnsupported(ShoalError):
    """A model was found but would not be computed correctly here; the message says why."""


class EngineDied(ShoalError):
    """Engines end while they compute a request, or the last one ended (HTTP 500)."""


class ServiceUnavailable(EngineDied):
    """No engine of a service runs, and none came back for a while; another time one may (HTTP 503)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it may be worth to ask again."""
