"""The HTTP application: OpenAI's endpoints and those for operators."""

from collections.abc import Mapping, Sequence

from fastapi import FastAPI

import shoal
from shoal.core import Service
from shoal.serve.api import Api
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.embedding_endpoints import EmbeddingEndpoints
from shoal.serve.errors import install_error_handlers
from shoal.serve.generation_endpoints import GenerationEndpoints
from shoal.serve.lifecycle import Lifecycle, LifecycleMiddleware
from shoal.serve.openapi import document
from shoal.serve.options import ServerOptions
from shoal.serve.server_endpoints import ServerEndpoints
from shoal.serve.stateless.endpoints import ResponsesEndpoints
from shoal.serve.token_endpoints import TokenEndpoints
from shoal.serve.workers import WorkerProcesses, Workers


def create_app(
    backend: Backend,
    tokenizers: Mapping[str, TextCodec],
    services: Sequence[Service],
    options: ServerOptions | None = None,
    lifecycle: Lifecycle | None = None,
    workers: Workers | None = None,
) -> FastAPI:
    """The application in front of ``backend``.

    tokenizers: by service name. lifecycle: tells when the server drains; by default it never does.
    workers: run long work outside the event loop; by default in other processes.
    """
    lifecycle = lifecycle or Lifecycle()
    api = Api(
        backend, tokenizers, services, options or ServerOptions(), lifecycle, workers or WorkerProcesses()
    )
    app = FastAPI(
        title="Shoal",
        version=shoal.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_middleware(LifecycleMiddleware, lifecycle=lifecycle)
    for endpoints in (
        GenerationEndpoints(api),
        ResponsesEndpoints(api),
        EmbeddingEndpoints(api),
        TokenEndpoints(api),
        ServerEndpoints(api),
    ):
        endpoints.add_to(app)
    names = [service.name for service in services]
    chat_names = [name for name in names if tokenizers[name].has_chat_template]

    def openapi() -> dict[str, object]:
        app.openapi_schema = app.openapi_schema or document(app, names, chat_names)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app
