"""Exceptions for users and clients; each message says what was wrong and what is possible."""

from collections.abc import Iterable


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose."""


class ConfigError(ShoalError):
    """A configuration file, flag or argument is wrong."""


class InvalidRequest(ShoalError):
    """The request can never be served in this form (HTTP 400, or 404 for an unknown model)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The invalid field, as the client wrote it."""
        self.code = code
        """Machine-readable, such as ``context_length_exceeded`` or ``model_not_found``."""


def model_not_found(name: str, served: Iterable[str]) -> InvalidRequest:
    """The error for a model that is not among those served."""
    names = ", ".join(sorted(served)) or "none"
    return InvalidRequest(
        f"model {name!r} is not served here; available: {names}", param="model", code="model_not_found"
    )


class QueueFull(ShoalError):
    """Too many requests are waiting already (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Estimated time until there is room again."""


class SLOExpired(QueueFull):
    """A request waited until its latency goals could no longer be met (HTTP 429)."""


class ModelUnavailable(ShoalError):
    """A model's files cannot be found or fetched; the message says what to do."""


class ModelUnsupported(ShoalError):
    """A model was found but cannot be computed correctly here; the message says why."""


class EngineDied(ShoalError):
    """The engines that computed a request died, or the last engine of the service did (HTTP 500)."""


class ServiceUnavailable(EngineDied):
    """No engine of the service runs, and none has come back for a while (HTTP 503)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When the client may retry."""
