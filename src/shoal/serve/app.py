"""The HTTP application: OpenAI's endpoints and those for operators."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

import shoal
from shoal.core import EngineDied, InvalidRequest, SamplingParams, Service
from shoal.core.sampling import MAX_CHOICES
from shoal.core.service import NO_GOALS
from shoal.engine.info import EngineInfo
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from shoal.serve.errors import MODEL_NOT_FOUND, EngineSilent, ShuttingDown, install_error_handlers
from shoal.serve.formats import ChatFormat, CompletionFormat, StreamUsage
from shoal.serve.generation import GenerationRequest
from shoal.serve.generation_response import GenerationResponse
from shoal.serve.lifecycle import Lifecycle, LifecycleMiddleware
from shoal.serve.logprobs import LogprobFormatter
from shoal.serve.metrics import ServerMetrics
from shoal.serve.openapi import document, fails, returns, streams, takes
from shoal.serve.options import ServerOptions
from shoal.serve.parse import Body, parse_body
from shoal.serve.prompts import encode_prompt
from shoal.serve.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
    Version,
    encode,
)
from shoal.serve.workers import WorkerProcesses, Workers

# Prompts with more characters than this are tokenised in a thread, so that streams go on meanwhile.
_LONG_TEXT_CHARACTERS = 1024
_MAX_TOKENISER_THREADS = 2
# A token is about 4 bytes of text, and JSON may escape a character with 6 or 12.
_BODY_BYTES_PER_TOKEN = 64
_MIN_BODY_BYTES = 2**20
# Most characters that a chat template may write for each byte of the largest body.
_TEMPLATE_GROWTH = 2
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GENERATION_ERRORS = fails(400, 404, 413, 415, 429, 500, 503)


class Api:
    """The endpoints. ``tokenizers`` are by service name."""

    def __init__(
        self,
        backend: Backend,
        tokenizers: Mapping[str, TextCodec],
        services: Sequence[Service],
        options: ServerOptions,
        lifecycle: Lifecycle,
        workers: Workers,
    ) -> None:
        self._backend = backend
        self._tokenizers = tokenizers
        self._max_body_bytes = options.max_body_bytes or _body_bytes(backend.info)
        self._workers = workers
        self._parse_lock = asyncio.Lock()
        self._tokeniser_threads = CapacityLimiter(_MAX_TOKENISER_THREADS)
        self._lifecycle = lifecycle
        self._metrics = ServerMetrics(services)
        created = int(time.time())
        self._cards = {
            service.name: ModelCard(
                service.name,
                created,
                backend.info.services[service.name].max_total_tokens,
                service.sampling.over({}),
            )
            for service in services
        }

    def _card(self, model: str, param: str | None) -> ModelCard:
        card = self._cards.get(model)
        if card is None:
            raise InvalidRequest(
                f"model {model!r} is not served here; available: {', '.join(self._cards)}",
                param=param,
                code=MODEL_NOT_FOUND,
            )
        return card

    async def models(self) -> Response:
        """The services, in the order of the configuration."""
        return _json(ModelList(list(self._cards.values())))

    async def model(self, request: Request) -> Response:
        """The service with the id in the path."""
        return _json(self._card(request.path_params["model_id"], None))

    async def completions(self, request: Request) -> Response:
        """Complete one prompt or several."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, CompletionBody)
        card = self._card(body.model, "model")
        prompts = body.prompts()
        _check_choices(len(prompts), body.n or 1)
        tokens = await self._encode(body.model, prompts, body.add_special_tokens is not False)
        longest_output = card.max_model_len - max(map(len, tokens))
        default_max_tokens = max(1, min(longest_output, max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)))
        sampling = body.sampling(card.sampling_defaults, default_max_tokens)
        return self._generate(body, "cmpl", tokens, sampling, arrival_ns)

    async def chat_completions(self, request: Request) -> Response:
        """Write the next message of a chat."""
        arrival_ns = time.monotonic_ns()
        body = await self._body(request, ChatBody)
        card = self._card(body.model, "model")
        text = await self._workers.run(
            f"chats of {body.model}",
            f"laying out these messages with the chat template of {body.model}",
            self._tokenizers[body.model].chat_template.render,
            body.conversation(),
            _TEMPLATE_GROWTH * self._max_body_bytes,
        )
        # The template writes every special token itself.
        tokens = await self._encode(body.model, [text], add_special_tokens=False)
        return self._generate(body, "chatcmpl", tokens, body.sampling(card.sampling_defaults), arrival_ns)

    async def _body(self, request: Request, body_type: type[Body]) -> Body:
        return await parse_body(
            request, body_type, self._max_body_bytes, self._backend.info, self._workers, self._parse_lock
        )

    async def _encode(
        self, service: str, prompts: Sequence[str] | Sequence[list[int]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of all prompts; those that were sent as ids stay as they are."""
        tokenizer = self._tokenizers[service]
        limits = self._backend.info.services[service]

        def encode_all() -> list[list[int]]:
            return [
                encode_prompt(tokenizer, limits, service, prompt, add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= _LONG_TEXT_CHARACTERS:
            return encode_all()
        return await to_thread.run_sync(encode_all, limiter=self._tokeniser_threads)

    def _generate(
        self,
        body: GenerationBody,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        arrival_ns: int,
    ) -> Response:
        request = GenerationRequest(
            id=f"{prefix}-{secrets.token_hex(12)}",
            service=body.model,
            prompts=prompts,
            sampling=sampling,
            arrival_ns=arrival_ns,
            slo=NO_GOALS if body.slo is None else body.slo.slo(),
        )
        num_logprobs = sampling.logprobs
        logprobs = (
            None if num_logprobs is None else LogprobFormatter(self._tokenizers[body.model], num_logprobs)
        )
        format_type = ChatFormat if prefix == "chatcmpl" else CompletionFormat
        options = body.stream_options or StreamOptions()
        usage = StreamUsage(bool(options.include_usage), bool(options.continuous_usage_stats))
        format = format_type(request.id, body.model, logprobs, usage)
        return GenerationResponse(
            request, format, bool(body.stream), self._backend, self._metrics, self._lifecycle
        )

    async def health(self) -> Response:
        """Whether the server takes requests and the engine runs."""
        if self._lifecycle.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if not self._backend.alive:
            raise EngineDied("the engine has ended; restart the server")
        if silence := self._backend.vitals.silence():
            since = datetime.now(UTC) - timedelta(seconds=silence.duration_s)
            raise EngineSilent(f"degraded since {since:%Y-%m-%dT%H:%M:%SZ}: {silence.what}")
        return _json(Health())

    async def metrics(self) -> Response:
        """Prometheus metrics; without the engine's own if it has ended."""
        vitals = self._backend.vitals
        stats = vitals.stats if self._backend.alive else None
        return Response(self._metrics.render(stats, vitals.age_s), media_type=_METRICS_TYPE)

    async def version(self) -> Response:
        """The version of Shoal."""
        return _json(Version(shoal.__version__))


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
    _add_routes(app, api)
    names = [service.name for service in services]
    chat_names = [name for name in names if tokenizers[name].has_chat_template]

    def openapi() -> dict[str, object]:
        app.openapi_schema = app.openapi_schema or document(app, names, chat_names)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    for path, endpoint, full, chunk, body in (
        ("/v1/completions", api.completions, Completion, Completion, CompletionBody),
        ("/v1/chat/completions", api.chat_completions, ChatCompletion, ChatChunk, ChatBody),
    ):
        responses = returns(full, "The response, full or as a stream.")
        responses[200]["content"].update(streams(chunk))
        app.post(path, responses=responses | _GENERATION_ERRORS, openapi_extra=takes(body))(endpoint)
    _get(app, "/v1/models", api.models, responses=returns(ModelList, "The services."))
    name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    _get(
        app,
        "/v1/models/{model_id:path}",
        api.model,
        responses=returns(ModelCard, "The service.") | fails(404),
        openapi_extra={"parameters": [name]},
    )
    _get(app, "/health", api.health, responses=returns(Health, "Requests are taken.") | fails(503))
    _get(app, "/version", api.version, responses=returns(Version, "The version."))
    _get(
        app,
        "/metrics",
        api.metrics,
        responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
        response_class=Response,
    )


def _get(app: FastAPI, path: str, endpoint: Callable[..., Any], **documented: Any) -> None:
    """Route GET and HEAD; the web server leaves out the body for HEAD."""
    app.get(path, **documented)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)


def _json(value: Struct) -> Response:
    return Response(encode(value), media_type="application/json")


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with n={n} are {prompts * n} outputs; one request can have {MAX_CHOICES}",
            param="n",
        )


def _body_bytes(info: EngineInfo) -> int:
    """The largest body to read; it follows from the longest context of all services."""
    longest = max(limits.max_total_tokens for limits in info.services.values())
    return max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * longest)
