"""Rejects request bodies with a Content-Encoding, such as gzip, which the server does not decode."""

from collections.abc import Iterable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.serve.errors import BodyEncoded
from shoal.serve.http.error_responses import error_response, shorten

_MAX_QUOTED_CHARACTERS = 80


class ContentCodingMiddleware:
    """Rejects requests whose body has a content coding, on all routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (coding := _coding(scope)) is not None:
            error = BodyEncoded(
                f"cannot read a body with Content-Encoding: {shorten(coding, _MAX_QUOTED_CHARACTERS)}; "
                "send it as it is"
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _coding(scope: Scope) -> str | None:
    """The first content coding of a body; None: there is no body, or it has no coding."""
    headers = scope["headers"]
    has_body = any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in headers
    )
    codings = header_entries(headers, b"content-encoding") if has_body else ()
    return next((coding for coding in codings if coding != "identity"), None)


def header_entries(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> Iterator[str]:
    """The entries of all headers ``name``, in lower case and without parameters."""
    for header, value in headers:
        if header == name:
            for entry in value.decode("latin-1").split(","):
                if coding := entry.partition(";")[0].strip().lower():
                    yield coding
