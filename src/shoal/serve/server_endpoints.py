"""The endpoints that tell about the server: models, health, metrics, version."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

import shoal
from shoal.core import EngineDied
from shoal.serve.api import Api, json_response
from shoal.serve.docs_page import docs_page
from shoal.serve.errors import EngineSilent, ShuttingDown
from shoal.serve.openapi import fails, returns
from shoal.serve.responses import Health, Index, ModelCard, ModelList, Version

# The page needs its own style and nothing else.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerEndpoints:
    """What clients and operators can ask about the server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        _get(app, "/v1/models", self.models, responses=returns(ModelList, "The services."))
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        _get(
            app,
            "/v1/models/{model_id:path}",
            self.model,
            responses=returns(ModelCard, "The service.") | fails(404),
            openapi_extra={"parameters": [name]},
        )
        _get(app, "/health", self.health, responses=returns(Health, "Requests are taken.") | fails(503))
        _get(app, "/version", self.version, responses=returns(Version, "The version."))
        _get(
            app,
            "/metrics",
            self.metrics,
            responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
            response_class=Response,
        )
        _get(app, "/", self.index, include_in_schema=False)
        _get(app, "/docs", self.docs, include_in_schema=False)

    async def models(self, request: Request) -> Response:
        """The services that the client may use, in the order of the configuration."""
        return json_response(ModelList(list(self._api.visible_cards(request).values())))

    async def model(self, request: Request) -> Response:
        """The service with the id in the path."""
        if not request.path_params["model_id"]:
            raise HTTPException(404)
        return json_response(self._api.card(request, request.path_params["model_id"], None))

    async def health(self) -> Response:
        """Whether the server takes requests and the engine runs."""
        if self._api.lifecycle.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if not self._api.backend.alive:
            raise EngineDied("the engine has ended; restart the server")
        if silence := self._api.backend.vitals.silence():
            since = datetime.now(UTC) - timedelta(seconds=silence.duration_s)
            raise EngineSilent(f"degraded since {since:%Y-%m-%dT%H:%M:%SZ}: {silence.what}")
        return json_response(Health())

    async def metrics(self) -> Response:
        """Prometheus metrics; without the engine's own if it has ended."""
        vitals = self._api.backend.vitals
        stats = vitals.stats if self._api.backend.alive else None
        return Response(self._api.metrics.render(stats, vitals.age_s), media_type=_METRICS_TYPE)

    async def version(self) -> Response:
        """The version of Shoal."""
        return json_response(Version(shoal.__version__))

    async def index(self, request: Request) -> Response:
        """What there is here."""
        routes = [
            f"{method} {route.path_format}"
            for route in request.app.routes
            if isinstance(route, APIRoute)
            for method in sorted((route.methods or set()) - {"HEAD"})
        ]
        return json_response(Index(shoal.__version__, routes))

    async def docs(self, request: Request) -> Response:
        """A page about the interface."""
        return HTMLResponse(docs_page(request.app.openapi()), headers=_PAGE_HEADERS)


def _get(app: FastAPI, path: str, endpoint: Callable[..., Any], **documented: Any) -> None:
    """Route GET and HEAD; the web server leaves out the body for HEAD."""
    app.get(path, **documented)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)
