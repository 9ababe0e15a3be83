"""What Ollama's API changes for everybody: which models there are, and which stay loaded."""

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
# When a service that could not be loaded may be asked for again.
_RETRY_S = 5
_SUCCESS = {"status": "success"}


class OllamaOperations:
    """For operators, as ``rights`` says; how long a service stays loaded others may say without effect."""

    def __init__(self, api: Api, admin: ClusterAdmin, rights: OperatorRights) -> None:
        self._api = api
        self._admin = admin
        self._rights = rights

    def kept_s(self, request: Request, asked_s: float | None) -> float | None:
        """How long a service is to stay loaded after ``request``, which asks for ``asked_s``; None: as it is.

        To unload a service at once takes an operator: raises AdminKeyRequired or AdminAccessDenied.
        """
        if asked_s is None:
            return None
        try:
            self._rights.check(request.scope)
        except (AdminKeyRequired, AdminAccessDenied) as error:
            if asked_s == 0:
                raise type(error)(f"keep_alive: 0 unloads the model for everybody: {error}") from None
            return None
        return asked_s

    async def keep(self, service: str, kept_s: float) -> None:
        """Let a service be unloaded when it had no request for so long."""
        with suppress(ConfigError):  # it was removed meanwhile
            await self._api.backend.administration.keep_service(
                service, None if kept_s == math.inf else kept_s
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
        operation = self._pulling(body.model)
        if body.stream is False:
            await self._done(operation)
            return Response(encode(_SUCCESS), media_type="application/json")
        lines = self._progress_lines(operation)
        return StreamingResponse(lines, media_type=JSON_LINES.media_type.decode())

    def _pulling(self, asked: str) -> Operation | None:
        """What fetches the model that is asked for; None: it is there."""
        name = asked.removesuffix(LATEST)
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

    async def _progress_lines(self, operation: Operation | None) -> AsyncIterator[bytes]:
        """The lines of a stream: how far it is, and its end."""
        told: dict[str, Any] = {}
        while operation is not None and operation.state == "running" and not self._api.lifecycle.draining:
            line: dict[str, Any] = {"status": operation.progress}
            if operation.total is not None:
                line |= {"total": operation.total, "completed": operation.done}
            if line != told:
                told = line
                yield JSON_LINES.event(encode(line))
            await asyncio.sleep(_POLL_S)
        try:
            await self._done(operation)
        except (Conflict, ShuttingDown) as error:
            yield JSON_LINES.event(encode({"error": str(error)}))
        else:
            yield JSON_LINES.event(encode(_SUCCESS))

    async def remove(self, service: str) -> None:
        """Remove a service; its files stay in the cache. As for ``pull`` only operators ask for it."""
        await self._done(self._admin.remove_service(service))

    async def _done(self, operation: Operation | None) -> None:
        """Wait for an operation; raises Conflict with what went wrong, or ShuttingDown."""
        while operation is not None and operation.state == "running":
            if self._api.lifecycle.draining:
                raise ShuttingDown("the server is shutting down")
            await asyncio.sleep(_POLL_S)
        if operation is not None and operation.error is not None:
            raise Conflict(operation.error)


class FollowUpResponse(Response):
    """A response after which something else happens, unless the server ends before."""

    def __init__(self, response: Response, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._response = response
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await self._response(scope, receive, send)
        await self._then()
