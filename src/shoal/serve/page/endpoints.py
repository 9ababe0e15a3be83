"""The endpoints of the page: /, /page/{name} and /live."""

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

import shoal
from shoal.serve.api import Api, add_get, json_response
from shoal.serve.http.request_context import context_of
from shoal.serve.openai.response_bodies import Index
from shoal.serve.page.feed import LiveFeed

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # The operators' routes know by it that a request is the page's.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_LIVE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_LIVE_TYPE = "text/event-stream"


class PageEndpoints:
    """Serves the files of the page, and the feed of what it shows."""

    def __init__(self, api: Api, feed: LiveFeed) -> None:
        self._api = api
        self._feed = feed
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in sorted(_FOLDER.iterdir())
        }

    def add_to(self, app: FastAPI) -> None:
        add_get(app, "/", self.index, include_in_schema=False)
        add_get(app, "/page/{name}", self.file, include_in_schema=False)
        app.get("/live", include_in_schema=False)(self.live)
        app.head("/live", include_in_schema=False)(self.live_headers)

    async def index(self, request: Request) -> Response:
        """The page for browsers; for programs the version and all routes."""
        if "text/html" in request.headers.get("accept", ""):
            return self._file("index.html")
        routes = [
            f"{method} {route.path_format}"
            for route in request.app.routes
            if isinstance(route, APIRoute)
            for method in sorted((route.methods or set()) - {"HEAD"})
        ]
        return json_response(Index(shoal.__version__, routes))

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        return self._file(request.path_params["name"])

    async def live(self, request: Request) -> Response:
        """Snapshots as server-sent events, one a second: of the services that the API key may use."""
        key = context_of(request.scope).key
        events = self._feed.watch(None if key is None else key.services)
        return StreamingResponse(events, headers=_LIVE_HEADERS, media_type=_LIVE_TYPE)

    async def live_headers(self) -> Response:
        """As ``live``, without the snapshots, which have no end."""
        return Response(headers=_LIVE_HEADERS, media_type=_LIVE_TYPE)

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        content, media_type = self._files[name]
        return Response(content, headers=_HEADERS, media_type=media_type)
