"""Errors in the shape of Anthropic's API, which /v1/messages has."""

from shoal.serve.errors import (
    ENGINE_NOT_FOUND,
    MODEL_NOT_FOUND,
    OPERATION_NOT_FOUND,
    RESPONSE_NOT_FOUND,
)
from shoal.serve.openai.response_bodies import ErrorBody, encode

MESSAGES_PATH = "/v1/messages"
NOT_FOUND = (MODEL_NOT_FOUND, RESPONSE_NOT_FOUND, ENGINE_NOT_FOUND, OPERATION_NOT_FOUND)
"""Error codes of what does not exist."""
_TYPES = {
    "invalid_api_key": "authentication_error",
    "host_not_allowed": "permission_error",
    "model_not_allowed": "permission_error",
    "unknown_url": "not_found_error",
    "body_too_large": "request_too_large",
    "request_timeout": "timeout_error",
    "service_unavailable": "overloaded_error",
    "shutting_down": "overloaded_error",
    "too_many_connections": "overloaded_error",
} | dict.fromkeys(NOT_FOUND, "not_found_error")
"""Anthropic's type of an error, by our code."""


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def encode_message_error(body: ErrorBody, request_id: str) -> bytes:
    """The JSON of an error."""
    general = "api_error" if body.type == "server_error" else body.type
    error = {"type": _TYPES.get(body.code or "", general), "message": body.message}
    return encode({"type": "error", "error": error, "request_id": request_id})
