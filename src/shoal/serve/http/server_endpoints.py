"""The endpoints /v1/models, /version, /metrics, /scale and /docs."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

import shoal
from shoal.serve.api import Api, add_get, json_response
from shoal.serve.http.docs_page import docs_page
from shoal.serve.openai.response_bodies import ModelCard, ModelList, Scale, Version
from shoal.serve.openapi import fails, returns

# The docs page needs only its inline style.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        add_get(app, "/v1/models", self.models, responses=returns(ModelList, "The services."))
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        add_get(
            app,
            "/v1/models/{model_id:path}",
            self.model,
            responses=returns(ModelCard, "The service.") | fails(404),
            openapi_extra={"parameters": [name]},
        )
        add_get(app, "/version", self.version, responses=returns(Version, "The version."))
        add_get(
            app,
            "/metrics",
            self.metrics,
            responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
            response_class=Response,
        )
        add_get(app, "/scale", self.scale, responses=returns(Scale, "Numbers of engines."))
        add_get(app, "/docs", self.docs, include_in_schema=False)

    async def models(self, request: Request) -> Response:
        """The services that the client may use, in the order of the configuration."""
        return json_response(ModelList(list(self._api.visible_cards(request).values())))

    async def model(self, request: Request) -> Response:
        """The service with the id in the path."""
        if not request.path_params["model_id"]:
            raise HTTPException(404)
        return json_response(self._api.card(request, request.path_params["model_id"], None))

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        backend = self._api.backend
        page = self._api.metrics.render(
            backend.engines, backend.services, backend.wanted_engines, backend.placing
        )
        return Response(page, media_type=_METRICS_TYPE)

    async def scale(self) -> Response:
        """How many engines there are and should be, for autoscalers."""
        backend = self._api.backend
        running = sum(engine.runs for engine in backend.engines)
        return json_response(Scale(backend.wanted_engines, running, len(backend.engines)))

    async def version(self) -> Response:
        """The version of Shoal."""
        return json_response(Version(shoal.__version__))

    async def docs(self, request: Request) -> Response:
        """A page about the HTTP interface."""
        return HTMLResponse(docs_page(request.app.openapi()), headers=_PAGE_HEADERS)
