"""State that all endpoints share: served services, their tokenizers, body parsing and prompt encoding."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

import shoal
from shoal.core import SLO, InvalidRequest, Service
from shoal.engine.info import ServiceInfo
from shoal.frontend.validation import Limits, most_prompt_tokens
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.body_parsing import Body, parse_body, parse_bytes
from shoal.serve.cpu_workers import Workers
from shoal.serve.errors import MODEL_NOT_FOUND
from shoal.serve.http.api_key_limits import ApiKeyLimits
from shoal.serve.http.request_context import context_of
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.openai.response_bodies import ModelCard, encode
from shoal.serve.options import ServerOptions
from shoal.serve.unknown_fields import IgnoredFieldLog

# A token is about 4 bytes of text, and JSON may escape a character with 6 or 12.
_BODY_BYTES_PER_TOKEN = 64
_MIN_BODY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Served:
    """A service that clients can use."""

    service: Service
    tokenizer: TextCodec
    created: int = field(default_factory=lambda: int(time.time()))
    """When the service was added, in seconds since 1970."""


class Api:
    """State that all endpoints share.

    services, tokenizers: those of the start; tokenizers by service name.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizers: Mapping[str, TextCodec],
        services: Sequence[Service],
        options: ServerOptions,
        lifecycle: Lifecycle,
        workers: Workers,
    ) -> None:
        self.backend = backend
        self.lifecycle = lifecycle
        self.workers = workers
        """Run slow work on client input outside the event loop."""
        build = {
            "version": shoal.__version__,
            "kernels": backend.info.kernels,
            "device": backend.info.device,
        }
        self.metrics = ServerMetrics((), build, options.vllm_metrics)
        self._max_body_bytes = options.max_body_bytes
        self._parse_lock = asyncio.Lock()
        self._ignored = IgnoredFieldLog() if options.unknown_fields == "ignore" else None
        self._served: dict[str, _Served] = {}
        for service in services:
            self.add_service(service, tokenizers[service.name])

    def add_service(self, service: Service, tokenizer: TextCodec) -> None:
        """Serve a service that the engines know."""
        self._served[service.name] = _Served(service, tokenizer)
        self.metrics.add_service(service)

    def remove_service(self, name: str) -> TextCodec | None:
        """Stop serving a service; its metrics stay. Returns its tokenizer, if the service was there."""
        served = self._served.pop(name, None)
        return None if served is None else served.tokenizer

    @property
    def services(self) -> Mapping[str, Service]:
        """The services by name, in the order of the configuration; added ones follow."""
        return {name: served.service for name, served in self._served.items()}

    @property
    def max_body_bytes(self) -> int:
        return self._max_body_bytes or _default_body_bytes(self.backend.info)

    def tokenizer(self, service: str) -> TextCodec:
        """A service's tokenizer; raises an InvalidRequest (404) if the service was removed."""
        return self._find(service).tokenizer

    def pace_s(self, service: str, slo: SLO) -> float | None:
        """Time between two tokens to which streams are smoothed; None: they are not.

        slo: goals of the request. Raises an InvalidRequest (404) if the service was removed.
        """
        served = self._find(service).service
        if not served.pace:
            return None
        return served.slo.tpot_s if slo.tpot_s is None else slo.tpot_s

    def limits(self, service: str) -> ServiceInfo:
        """A service's limits; raises an InvalidRequest (404) if the service was removed."""
        self._find(service)
        return self.backend.info.services[service]

    def visible_cards(self, request: Request) -> dict[str, ModelCard]:
        """The services that the API key of ``request`` may use, by name."""
        visible = self._visible(context_of(request.scope).key)
        return {name: self._card(self._served[name]) for name in visible}

    def card(self, request: Request, model: str, param: str | None) -> ModelCard:
        """The service ``model``, which is noted in the request's context.

        Raises an InvalidRequest (404) about ``param`` if there is none, and ServiceNotAllowed if the API key
        of ``request`` may not use it.
        """
        context = context_of(request.scope)
        served = self._find(model, param, context.key)
        context.service = model
        if context.key:
            context.key.check_service(model)
        return self._card(served)

    def _find(self, name: str, param: str | None = "model", key: ApiKeyLimits | None = None) -> _Served:
        served = self._served.get(name)
        if served is None:
            raise InvalidRequest(
                f"model {name!r} is not served here; available: {', '.join(self._visible(key))}",
                param=param,
                code=MODEL_NOT_FOUND,
            )
        return served

    def _visible(self, key: ApiKeyLimits | None) -> list[str]:
        return [name for name in self._served if key is None or key.may_use(name)]

    def _card(self, served: _Served) -> ModelCard:
        service = served.service
        max_tokens = self.backend.info.services[service.name].max_total_tokens
        return ModelCard(service.name, served.created, max_tokens, service.sampling.with_fallback({}))

    async def body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, which counts toward the rate limit of its API key.

        Raises RateLimited, and the errors of ``parse_body``.
        """
        if key := context_of(request.scope).key:
            key.start_request(time.monotonic())
        return await parse_body(
            request,
            body_type,
            self.max_body_bytes,
            self.backend.info,
            self.workers,
            self._parse_lock,
            self._ignored,
        )

    async def parse(self, raw: bytes, body_type: type[Body]) -> Body:
        """A body that was translated from another API's; raises the errors of ``parse_bytes``."""
        return await parse_bytes(
            raw, body_type, self.backend.info, self.workers, self._parse_lock, self._ignored
        )

    async def encode_truncated(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        truncate_to: int | None,
        output_tokens: int,
    ) -> list[list[int]]:
        """The last ``truncate_to`` tokens of each prompt, otherwise as ``encode``.

        truncate_to, output_tokens: as in ``most_prompt_tokens``.
        """
        prompt_tokens = await self.encode(
            service, prompts, add_special_tokens, unlimited=truncate_to is not None
        )
        kept = most_prompt_tokens(self.limits(service), truncate_to, output_tokens)
        return prompt_tokens if kept is None else [tokens[-kept:] for tokens in prompt_tokens]

    async def encode(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        *,
        unlimited: bool = False,
    ) -> list[list[int]]:
        """Token ids of all prompts; prompts that were sent as token ids are returned as they are.

        Unless ``unlimited``, encoding stops early and raises InvalidRequest at a text that leaves no room for
        output. Raises ServiceUnavailable, too.
        """
        tokenizer, limits = self.tokenizer(service), self.limits(service)
        await tokenizer.ready()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        if unlimited:
            return (await tokenizer.encode_texts(texts, add_special_tokens)).tokens
        encoded = await tokenizer.encode_texts(texts, add_special_tokens, limits.max_total_tokens - 1)
        if encoded.at_least is not None:
            limits.lengths(service).check_prompt(encoded.at_least, at_least=True)
        return encoded.tokens


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], **documented: Any) -> None:
    """Route GET and HEAD; the web server leaves out the body for HEAD."""
    app.get(path, **documented)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)


def json_response(value: Struct) -> Response:
    return Response(encode(value), media_type="application/json")


def _default_body_bytes(info: Limits) -> int:
    """The largest body, from the longest context of all services."""
    longest = max((limits.max_total_tokens for limits in info.services.values()), default=0)
    return max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * longest)
