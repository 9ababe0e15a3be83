"""Operations of Ollama's API on models: pull, delete, load, and keep_alive."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.cluster.status import ServiceState
from shoal.config.services import read_added_service
from shoal.config.setting_tree import Table, node_of
from shoal.core import ConfigError, ServiceUnavailable
from shoal.serve.admin.cluster_admin import ClusterAdmin
from shoal.serve.admin.cluster_responses import Operation
from shoal.serve.admin.endpoints import settings_errors
from shoal.serve.admin.guard import OperatorRights
from shoal.serve.api import Api
from shoal.serve.errors import AdminAccessDenied, AdminKeyRequired, Conflict, ShuttingDown
from shoal.serve.ollama.formats import JSON_LINES
from shoal.serve.ollama.models import LATEST
from shoal.serve.ollama.request_bodies import PullBody
from shoal.serve.openai.response_bodies import encode

# Ollama's names of models on the hub begin with its host.
_HUB_HOSTS = ("hf.co/", "huggingface.co/")
_POLL_S = 0.1
# Retry-After when a service could not be loaded.
_RETRY_S = 5
_SUCCESS = {"status": "success"}


class OllamaOperations:
    """Operations for operators only, as ``rights`` decides; the keep_alive of other clients is ignored."""

    def __init__(self, api: Api, admin: ClusterAdmin, rights: OperatorRights) -> None:
        self._api = api
        self._admin = admin
        self._rights = rights

    def keep_alive_s(self, request: Request, requested_s: float | None) -> float | None:
        """``requested_s`` if an operator sent ``request``; None: the service's idle time does not change.

        Raises AdminKeyRequired or AdminAccessDenied if a client that is no operator unloads a service.
        """
        if requested_s is None:
            return None
        try:
            self._rights.check(request.scope)
        except (AdminKeyRequired, AdminAccessDenied) as error:
            if requested_s == 0:
                raise type(error)(f"keep_alive: 0 unloads the model for everybody: {error}") from None
            return None
        return requested_s

    async def keep(self, service: str, keep_alive_s: float) -> None:
        """Unload a service after ``kept_s`` without a request; infinite: never."""
        with suppress(ConfigError):  # it was removed meanwhile
            await self._api.backend.administration.keep_service(
                service, None if keep_alive_s == math.inf else keep_alive_s
            )

    async def load(self, service: str) -> None:
        """Load a service unless it is loaded; raises ServiceUnavailable."""
        status = self._api.backend.services.get(service)
        if status is None or status.state is ServiceState.READY:
            return
        try:
            await self._api.backend.administration.load_service(service)
        except ConfigError as error:
            raise ServiceUnavailable(str(error), _RETRY_S) from None

    async def pull(self, body: PullBody) -> Response:
        """Download a model, and serve it under its name; ``AdminMiddleware`` lets only operators do this."""
        operation = self._start_pull(body.model)
        if body.stream is False:
            await self._wait_done(operation)
            return Response(encode(_SUCCESS), media_type="application/json")
        lines = self._progress_events(operation)
        return StreamingResponse(lines, media_type=JSON_LINES.media_type.decode())

    def _start_pull(self, requested: str) -> Operation | None:
        """The operation that adds a model as a service; None: it is served already."""
        name = requested.removesuffix(LATEST)
        if name in self._api.services or name + LATEST in self._api.services:
            return None
        for operation in self._admin.operations.all:
            if (operation.kind, operation.target, operation.state) == ("add_service", name, "running"):
                return operation
        model = name
        for host in _HUB_HOSTS:
            model = model.removeprefix(host)
        settings = node_of({"name": name, "model": model}, "the body")
        assert isinstance(settings, Table)
        with settings_errors():
            service, engines = read_added_service(settings)
            return self._admin.add_service(service, engines)

    async def _progress_events(self, operation: Operation | None) -> AsyncIterator[bytes]:
        """A stream of progress, then success or an error."""
        last: dict[str, Any] = {}
        while operation is not None and operation.state == "running" and not self._api.lifecycle.draining:
            line: dict[str, Any] = {"status": operation.progress}
            if operation.total is not None:
                line |= {"total": operation.total, "completed": operation.done}
            if line != last:
                last = line
                yield JSON_LINES.event(encode(line))
            await asyncio.sleep(_POLL_S)
        try:
            await self._wait_done(operation)
        except (Conflict, ShuttingDown) as error:
            yield JSON_LINES.event(encode({"error": str(error)}))
        else:
            yield JSON_LINES.event(encode(_SUCCESS))

    async def remove(self, service: str) -> None:
        """Remove a service; its files stay in the cache. ``AdminMiddleware`` lets only operators do this."""
        await self._wait_done(self._admin.remove_service(service))

    async def _wait_done(self, operation: Operation | None) -> None:
        """Wait for an operation; raises Conflict with its error, or ShuttingDown."""
        while operation is not None and operation.state == "running":
            if self._api.lifecycle.draining:
                raise ShuttingDown("the server is shutting down")
            await asyncio.sleep(_POLL_S)
        if operation is not None and operation.error is not None:
            raise Conflict(operation.error)


class FollowUpResponse(Response):
    """A response that is followed by an action, unless the server shuts down first."""

    def __init__(self, response: Response, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._response = response
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope, receive, send)
        await self._then()
