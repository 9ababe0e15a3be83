"""The HTTP application: middleware, and the endpoints of all APIs."""

from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

import shoal
from shoal.core import Service
from shoal.engine.options import EngineOptions
from shoal.serve.admin.cluster_admin import ClusterAdmin
from shoal.serve.admin.endpoints import AdminEndpoints
from shoal.serve.admin.guard import AdminMiddleware, OperatorRights
from shoal.serve.admin.kept_changes import KeptChanges
from shoal.serve.anthropic.endpoints import MessagesEndpoints
from shoal.serve.api import Api
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.cpu_workers import WorkerProcesses, Workers
from shoal.serve.http.access_log import log_request
from shoal.serve.http.allowed_hosts import AllowedHostsMiddleware
from shoal.serve.http.api_keys import ApiKeyMiddleware, Keyring
from shoal.serve.http.content_coding import ContentCodingMiddleware
from shoal.serve.http.error_responses import install_error_handlers
from shoal.serve.http.health_endpoints import HealthEndpoints
from shoal.serve.http.request_context import REQUEST_ID, RequestContext, RequestContextMiddleware
from shoal.serve.http.server_endpoints import ServerEndpoints
from shoal.serve.lifecycle import Lifecycle, LifecycleMiddleware
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.model_download import PullService, pull_service
from shoal.serve.ollama.endpoints import OllamaEndpoints
from shoal.serve.ollama.operations import OllamaOperations
from shoal.serve.openai.embedding_endpoints import EmbeddingEndpoints
from shoal.serve.openai.generation_endpoints import GenerationEndpoints
from shoal.serve.openai.tokenize_endpoints import TokenEndpoints
from shoal.serve.openapi import document
from shoal.serve.options import ServerOptions
from shoal.serve.page.endpoints import PageEndpoints
from shoal.serve.page.feed import LiveFeed
from shoal.serve.responses_api.endpoints import ResponsesEndpoints
from shoal.serve.tokenizers import Tokenizers
from shoal.serve.tracing import NoTracing, Tracing

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_OTHER = "other"


def create_app(
    backend: Backend,
    tokenizers: Mapping[str, TextCodec],
    services: Sequence[Service],
    options: ServerOptions | None = None,
    lifecycle: Lifecycle | None = None,
    workers: Workers | None = None,
    hosts: frozenset[str] | None = None,
    engine_options: EngineOptions | None = None,
    pull: PullService | None = None,
    tracing: Tracing | None = None,
    kept: KeptChanges | None = None,
) -> FastAPI:
    """The application in front of ``backend``.

    tokenizers: by service name. lifecycle: by default the server never drains. workers: run slow work outside
    the event loop; by default in worker processes. hosts: names that the Host header may have; None: any.
    engine_options: defaults of engines that operators add. pull: downloads the models of services that
    operators add; by default as at the start. tracing: makes spans of calls; by default none. kept: gets
    operators' changes; by default they end with the server. Raises ConfigError if an API key names an unknown
    service.
    """
    lifecycle, options = lifecycle or Lifecycle(), options or ServerOptions()
    api = Api(backend, tokenizers, services, options, lifecycle, workers or WorkerProcesses(preload=__name__))
    keys = options.named_api_keys()
    app = FastAPI(
        title="Shoal",
        version=shoal.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.metrics = api.metrics
    app.state.feed = LiveFeed(api)
    install_error_handlers(app)
    # The middleware added last runs first.
    app.add_middleware(ContentCodingMiddleware)
    app.add_middleware(LifecycleMiddleware, lifecycle=lifecycle)
    keyring = Keyring(keys, [service.name for service in services])
    rights = OperatorRights(options.admin_secret, keyring)
    app.add_middleware(AdminMiddleware, rights=rights)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keyring=keyring, is_operator=rights.holds_key)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after"),
        )
    if hosts is not None:
        app.add_middleware(AllowedHostsMiddleware, hosts=hosts)
    tracing = tracing or NoTracing()
    on_end = partial(_finish_request, api.metrics, options, app, tracing)
    app.add_middleware(RequestContextMiddleware, on_begin=tracing.begin, on_end=on_end)
    generation, embedding = GenerationEndpoints(api), EmbeddingEndpoints(api)
    admin = app.state.admin = ClusterAdmin(
        api, engine_options, pull or partial(pull_service, Tokenizers()), kept or KeptChanges.of(None)
    )
    for endpoints in (
        generation,
        ResponsesEndpoints(api),
        MessagesEndpoints(api),
        embedding,
        TokenEndpoints(api),
        OllamaEndpoints(api, generation, embedding, OllamaOperations(api, admin, rights)),
        ServerEndpoints(api),
        HealthEndpoints(api),
        AdminEndpoints(admin),
        PageEndpoints(api, app.state.feed),
    ):
        endpoints.add_to(app)
    documented: list[list[str]] = []

    def openapi() -> dict[str, object]:
        names = list(api.services)
        chats = [name for name in names if api.tokenizer(name).has_chat_template]
        if app.openapi_schema is None or documented != [names, chats]:
            app.openapi_schema = document(app, names, chats, bool(keys), options.unknown_fields)
            documented[:] = [names, chats]
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _finish_request(
    metrics: ServerMetrics,
    options: ServerOptions,
    app: FastAPI,
    tracing: Tracing,
    context: RequestContext,
    scope: Scope,
) -> None:
    """Count, trace and log a finished request; unknown paths and methods share one label."""
    tracing.end(context, scope)
    paths = {getattr(route, "path", None) for route in app.routes}
    route = scope["path"] if scope["path"] in paths else getattr(scope.get("route"), "path_format", _OTHER)
    method = scope["method"] if scope["method"] in _METHODS else _OTHER
    metrics.count_http(route, method, context.status)
    metrics.usage.count(context)
    if options.access_log:
        log_request(context, scope, options.access_log_format)
