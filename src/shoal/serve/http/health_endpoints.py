"""The endpoints of probes: /health, /health/live and /health/ready."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.core import InvalidRequest, ServiceUnavailable
from shoal.serve.admin.cluster_responses import Fine, Health, accepts_requests
from shoal.serve.api import Api, add_get, json_response
from shoal.serve.errors import MODEL_NOT_FOUND, ShuttingDown
from shoal.serve.openai.response_bodies import encode
from shoal.serve.openapi import fails, returns

# A dead engine may be restarted within seconds.
_RETRY_S = 5


class HealthEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
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
        if health.is_serving:
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
        served = self._api.backend.info.services  # without services that are being removed or added
        probed = [each for each in (services if name is None else [name]) if each in served]
        if not any(accepts_requests(services[each], self._api.backend.engines) for each in probed):
            subject = "no service has an" if name is None else f"service {name!r} has no"
            raise ServiceUnavailable(f"{subject} engine that is ready", _RETRY_S)
        return json_response(Fine())
