"""The endpoints /admin/engines, /admin/services, /admin/placement, /admin/usage and /admin/operations."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import Response

from shoal.config.devices import read_placed_service
from shoal.config.services import read_added_service
from shoal.config.setting_tree import SettingError, Table, node_of
from shoal.core import ConfigError, InvalidRequest, ModelUnavailable
from shoal.serve.admin.cluster_admin import ClusterAdmin
from shoal.serve.admin.cluster_responses import (
    EngineCards,
    Operation,
    OperationList,
    ServiceCards,
)
from shoal.serve.admin.placement_responses import PlacementTable
from shoal.serve.api import add_get, json_response
from shoal.serve.body_parsing import read_raw
from shoal.serve.openai.response_bodies import encode

_WHERE = "the body"
# Chat templates are the longest part of a body.
_MAX_BODY_BYTES = 2**20


class AdminEndpoints:
    """The endpoints of operators; ``AdminMiddleware`` decides who may use them."""

    def __init__(self, admin: ClusterAdmin) -> None:
        self._admin = admin

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; the OpenAPI document is for clients and leaves them out."""
        for path, endpoint in {
            "engines": self.engines,
            "services": self.services,
            "placement": self.placement,
            "usage": self.usage,
            "operations": self.operations,
        }.items():
            add_get(app, f"/admin/{path}", endpoint, include_in_schema=False)
        add_get(app, "/admin/operations/{id}", self.operation, include_in_schema=False)
        # The name of a service may be an id on the hub, with a slash.
        for path, change in {
            "engines": self.add_engine,
            "engines/{name}/drain": self.drain_engine,
            "engines/{name}/undrain": self.undrain_engine,
            "engines/{name}/activate": self.activate_engine,
            "engines/{name}/standby": self.deactivate_engine,
            "placement": self.place_service,
            "placement/plan": self.plan_placement,
            "placement/apply": self.apply_placement,
            "services": self.add_service,
            "services/{name:path}/load": self.load_service,
            "services/{name:path}/unload": self.unload_service,
            "services/{name:path}/pin": self.pin_service,
            "services/{name:path}/unpin": self.unpin_service,
        }.items():
            app.post(f"/admin/{path}", include_in_schema=False)(change)
        app.delete("/admin/engines/{name}", include_in_schema=False)(self.remove_engine)
        app.delete("/admin/services/{name:path}", include_in_schema=False)(self.remove_service)

    async def engines(self) -> Response:
        return json_response(EngineCards(self._admin.engines()))

    async def services(self) -> Response:
        return json_response(ServiceCards(self._admin.services()))

    async def placement(self) -> Response:
        return json_response(PlacementTable.of(self._admin.placement(), self._admin.placing))

    async def usage(self) -> Response:
        return json_response(self._admin.usage())

    async def operations(self) -> Response:
        """Long-running operations: running ones, and the last that ended."""
        return json_response(OperationList(self._admin.operations.all))

    async def operation(self, request: Request) -> Response:
        """One operation."""
        return json_response(self._admin.operations.find(request.path_params["id"]))

    async def add_service(self, request: Request) -> Response:
        """Add a service; the body is as in the configuration, with ``engines`` beside it."""
        settings = await _settings(request)
        with settings_errors():
            service, engines = read_added_service(settings)
            await self._admin.check_template(service)
            return _started(self._admin.add_service(service, engines))

    async def remove_service(self, request: Request) -> Response:
        return _started(self._admin.remove_service(_name(request)))

    async def load_service(self, request: Request) -> Response:
        return _started(self._admin.load_service(_name(request)))

    async def unload_service(self, request: Request) -> Response:
        return _started(self._admin.unload_service(_name(request)))

    async def pin_service(self, request: Request) -> Response:
        return _started(self._admin.pin_service(_name(request), True))

    async def unpin_service(self, request: Request) -> Response:
        return _started(self._admin.pin_service(_name(request), False))

    async def place_service(self, request: Request) -> Response:
        """Set the engines of a service; the body has ``service`` and ``engines``."""
        settings = await _settings(request)
        with settings_errors():
            service, engines = read_placed_service(settings)
            return _started(self._admin.place_service(service, engines))

    async def plan_placement(self, request: Request) -> Response:
        return _started(self._admin.propose_placement(apply=False))

    async def apply_placement(self, request: Request) -> Response:
        return _started(self._admin.propose_placement(apply=True))

    async def add_engine(self, request: Request) -> Response:
        """Add an engine; the body is as one of ``devices``, with ``services`` beside it."""
        settings = await _settings(request)
        with settings_errors():
            return _started(self._admin.add_engine(settings))

    async def drain_engine(self, request: Request) -> Response:
        return _started(self._admin.drain_engine(_name(request)))

    async def undrain_engine(self, request: Request) -> Response:
        return _started(self._admin.undrain_engine(_name(request)))

    async def activate_engine(self, request: Request) -> Response:
        return _started(self._admin.activate_engine(_name(request)))

    async def deactivate_engine(self, request: Request) -> Response:
        return _started(self._admin.deactivate_engine(_name(request)))

    async def remove_engine(self, request: Request) -> Response:
        return _started(self._admin.remove_engine(_name(request)))


async def _settings(request: Request) -> Table:
    """The body as settings; raises InvalidRequest if it is not a JSON object."""
    raw = await read_raw(request, _MAX_BODY_BYTES)
    try:
        settings = node_of(from_json(raw), _WHERE)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(settings, Table):
        raise InvalidRequest("the body must be a JSON object")
    return settings


@contextmanager
def settings_errors() -> Iterator[None]:
    """Turn errors in settings into InvalidRequest."""
    try:
        yield
    except ConfigError as error:
        param = error.path if isinstance(error, SettingError) else ""
        raise InvalidRequest(str(error), param or None) from None
    except ModelUnavailable as error:
        raise InvalidRequest(str(error), "model") from None


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _started(operation: Operation) -> Response:
    """A 202 with the operation, and its location."""
    headers = {"Location": f"/admin/operations/{operation.id}"}
    return Response(encode(operation), 202, headers, "application/json")
