"""The access log: a line for each request, as text or as JSON."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from shoal.serve.http.error_responses import shorten
from shoal.serve.http.request_context import RequestContext
from shoal.serve.options import LogFormat

ACCESS_LOGGER = "shoal.access"
_MAX_TEXT_CHARACTERS = 300
_DELETE = "\x7f"
_log = logging.getLogger(ACCESS_LOGGER)


def log_request(context: RequestContext, scope: Scope, format: LogFormat) -> None:
    """Write the line of a finished request.

    Queries are left out, since they may contain secrets. All client input is escaped, so that it can neither
    control a terminal nor look like another field or line.
    """
    fields = _fields(context, scope)
    _log.info("%s", _escaped(fields) if format == "json" else _text(fields))


def _fields(context: RequestContext, scope: Scope) -> dict[str, Any]:
    """The known fields, in the order in which they are written; times in seconds."""
    client = scope.get("client")
    total_s = (context.end_ns - context.arrival_ns) / 1e9
    fields = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "status": context.status,
        "method": scope["method"],
        "path": shorten(scope["path"], _MAX_TEXT_CHARACTERS),
        "id": context.id,
        "client": f"{client[0]}:{client[1]}" if client else None,
        "key": context.key.name if context.key else None,
        "service": context.service,
        "prompt_tokens": context.prompt_tokens if context.prompt_tokens else None,
        "output_tokens": context.output_tokens if context.prompt_tokens else None,
        "queue_s": context.queue_s,
        "first_token_s": context.first_token_s,
        "total_s": total_s,
        "why": shorten(context.why, _MAX_TEXT_CHARACTERS) or None,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}


def _text(fields: dict[str, Any]) -> str:
    """Time, status and request, then names and values."""
    request = _escaped(f"{fields.pop('method')} {fields.pop('path')}")
    head = f"{fields.pop('time')} {fields.pop('status')} {request}"
    if "why" in fields:
        fields["why"] = _escaped(fields["why"])
    return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])


def _escaped(value: Any) -> str:
    """The value as JSON in printable ASCII."""
    return json.dumps(value).replace(_DELETE, "\\u007f")
