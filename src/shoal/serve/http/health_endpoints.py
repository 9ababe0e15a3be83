"""The endpoints of probes: /health and those below it."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.core import InvalidRequest, ServiceUnavailable
from shoal.serve.admin.cluster_responses import Fine, Health, takes_requests
from shoal.serve.api import Api, add_get, json_response
from shoal.serve.errors import MODEL_NOT_FOUND, ShuttingDown
from shoal.serve.openai.response_bodies import encode
from shoal.serve.openapi import fails, returns

# An engine that died may be back after some seconds.
_RETRY_S = 5


class HealthEndpoints:
    """Whether the process, a service, or anything at all answers."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        service = {"name": "service", "in": "query", "required": False, "schema": {"type": "string"}}
        documented = returns(Health, "Requests are taken, by some service at least.")
        add_get(
            app,
            "/health",
            self.health,
            responses=documented | {503: returns(Health, "No service takes requests.")[200]},
        )
        add_get(app, "/health/live", self.live, responses=returns(Fine, "The process answers."))
        add_get(
            app,
            "/health/ready",
            self.ready,
            responses=returns(Fine, "The service takes requests.") | fails(404, 503),
            openapi_extra={"parameters": [service]},
        )

    async def health(self) -> Response:
        """Which engines and services work; 200 while any service can answer."""
        backend = self._api.backend
        health = Health.of(backend.engines, backend.services, self._api.lifecycle.draining)
        if health.answers:
            return json_response(health)
        headers = {"Retry-After": str(_RETRY_S)}
        return Response(encode(health), 503, headers, media_type="application/json")

    async def live(self) -> Response:
        """Whether this process answers."""
        return json_response(Fine())

    async def ready(self, request: Request) -> Response:
        """Whether a service, or without a name any of them, takes requests."""
        if self._api.lifecycle.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        services = self._api.backend.services
        name = request.query_params.get("service")
        if name is not None and name not in services:
            raise InvalidRequest(
                f"service {name!r} is not served here; available: {', '.join(services)}",
                param="service",
                code=MODEL_NOT_FOUND,
            )
        served = self._api.backend.info.services  # not one that is being removed, or is new and not loaded
        asked = [each for each in (services if name is None else [name]) if each in served]
        if not any(takes_requests(services[each], self._api.backend.engines) for each in asked):
            whose = "no service has an" if name is None else f"service {name!r} has no"
            raise ServiceUnavailable(f"{whose} engine that is ready", _RETRY_S)
        return json_response(Fine())
