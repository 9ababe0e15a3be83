"""The endpoints of operators: engines, services, and which has which."""

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.responses import Response

from shoal.serve.api import Api, json_response
from shoal.serve.cluster_responses import (
    EngineCard,
    EngineCards,
    Operations,
    PlacementTable,
    ServiceCard,
    ServiceCards,
)
from shoal.serve.routes import add_get


class AdminEndpoints:
    """What operators can ask about engines and services; ``AdminGuard`` says who may."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; the OpenAPI document is for clients and leaves them out."""
        for name, endpoint in {
            "engines": self.engines,
            "services": self.services,
            "placement": self.placement,
            "operations": self.operations,
        }.items():
            add_get(app, f"/admin/{name}", endpoint, include_in_schema=False)

    async def engines(self) -> Response:
        """All engines."""
        return json_response(EngineCards([EngineCard.of(engine) for engine in self._api.backend.engines]))

    async def services(self) -> Response:
        """All services."""
        placement, limits = self._placement(), self._api.backend.info.services
        cards = [
            ServiceCard(
                name,
                limits[name].model,
                placement[name],
                service.ready,
                service.wanted,
                service.waiting,
                service.resumed,
            )
            for name, service in self._api.backend.services.items()
        ]
        return json_response(ServiceCards(cards))

    async def placement(self) -> Response:
        """The engines of every service."""
        return json_response(PlacementTable(dict(self._placement())))

    async def operations(self) -> Response:
        """Work that takes long, such as loading a model; nothing starts any yet."""
        return json_response(Operations([]))

    def _placement(self) -> Mapping[str, list[str]]:
        engines = self._api.backend.engines
        return {
            service: [engine.name for engine in engines if service in engine.services]
            for service in self._api.backend.services
        }
