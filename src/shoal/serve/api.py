"""What the endpoints share: the services, their tokenizers, reading bodies, and running generations."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

import shoal
from shoal.core import InvalidRequest, Service
from shoal.engine.info import ServiceInfo
from shoal.frontend.validation import Limits, check_prompt_length, most_prompt_tokens
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.body_parsing import Body, parse_body, parse_bytes
from shoal.serve.cpu_workers import Workers
from shoal.serve.errors import MODEL_NOT_FOUND
from shoal.serve.http.api_key_limits import KeyHolder
from shoal.serve.http.request_context import context_of
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.openai.response_bodies import ModelCard, encode
from shoal.serve.options import ServerOptions
from shoal.serve.unknown_fields import IgnoredFields

# A token is about 4 bytes of text, and JSON may escape a character with 6 or 12.
_BODY_BYTES_PER_TOKEN = 64
_MIN_BODY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Served:
    """A service that clients may ask for."""

    service: Service
    tokenizer: TextCodec
    created: int = field(default_factory=lambda: int(time.time()))
    """Since when, in seconds since 1970."""


class Api:
    """What the endpoints share, and the services that clients may ask for.

    services, tokenizers: those that there are at the start; the latter by service name.
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
        """The engines."""
        self.lifecycle = lifecycle
        """Whether the server drains."""
        self.workers = workers
        """Run long work on client input outside the event loop."""
        build = {
            "version": shoal.__version__,
            "kernels": backend.info.kernels,
            "device": backend.info.device,
        }
        self.metrics = ServerMetrics((), build, options.vllm_metrics)
        """What the server measures itself."""
        self._max_body_bytes = options.max_body_bytes
        self._parse_lock = asyncio.Lock()
        self._ignored = IgnoredFields() if options.unknown_fields == "ignore" else None
        self._served: dict[str, _Served] = {}
        for service in services:
            self.add_service(service, tokenizers[service.name])

    def add_service(self, service: Service, tokenizer: TextCodec) -> None:
        """Let clients ask for a service that the engines know."""
        self._served[service.name] = _Served(service, tokenizer)
        self.metrics.add_service(service)

    def remove_service(self, name: str) -> TextCodec | None:
        """Let clients ask for a service no more; its metrics stay. Returns its tokenizer, if it was there."""
        served = self._served.pop(name, None)
        return None if served is None else served.tokenizer

    @property
    def services(self) -> Mapping[str, Service]:
        """The services by name, in the order of the configuration; those that came later follow."""
        return {name: served.service for name, served in self._served.items()}

    @property
    def max_body_bytes(self) -> int:
        """The largest body that is read."""
        return self._max_body_bytes or _body_bytes(self.backend.info)

    def tokenizer(self, service: str) -> TextCodec:
        """A service's tokenizer; raises an InvalidRequest (404) if the service was removed."""
        return self._find(service).tokenizer

    def limits(self, service: str) -> ServiceInfo:
        """A service's limits; raises an InvalidRequest (404) if the service was removed."""
        self._find(service)
        return self.backend.info.services[service]

    def visible_cards(self, request: Request) -> dict[str, ModelCard]:
        """The services that the API key of ``request`` may use, by name."""
        visible = self._visible(context_of(request.scope).key)
        return {name: self._card(self._served[name]) for name in visible}

    def card(self, request: Request, model: str, param: str | None) -> ModelCard:
        """The service called ``model``.

        Raises an InvalidRequest (404) about ``param`` if there is none, and ServiceNotAllowed if the API key
        of ``request`` may not use it.
        """
        context = context_of(request.scope)
        served = self._find(model, param, context.key)
        context.service = model
        if context.key:
            context.key.check_service(model)
        return self._card(served)

    def _find(self, name: str, param: str | None = "model", key: KeyHolder | None = None) -> _Served:
        served = self._served.get(name)
        if served is None:
            raise InvalidRequest(
                f"model {name!r} is not served here; available: {', '.join(self._visible(key))}",
                param=param,
                code=MODEL_NOT_FOUND,
            )
        return served

    def _visible(self, key: KeyHolder | None) -> list[str]:
        return [name for name in self._served if key is None or key.may_use(name)]

    def _card(self, served: _Served) -> ModelCard:
        service = served.service
        most = self.backend.info.services[service.name].max_total_tokens
        return ModelCard(service.name, served.created, most, service.sampling.with_fallback({}))

    async def body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, which counts for the rate of its API key.

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
        """A body that was made of another; raises the errors of ``parse_bytes``."""
        return await parse_bytes(
            raw, body_type, self.backend.info, self.workers, self._parse_lock, self._ignored
        )

    async def encode_cut(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        most: int | None,
        output_tokens: int,
    ) -> list[list[int]]:
        """The same as ``encode``, of each prompt the last ``most`` tokens.

        most: as in ``most_prompt_tokens``.
        """
        tokens = await self.encode(service, prompts, add_special_tokens, any_length=most is not None)
        kept = most_prompt_tokens(self.limits(service), most, output_tokens)
        return tokens if kept is None else [own[-kept:] for own in tokens]

    async def encode(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        *,
        any_length: bool = False,
    ) -> list[list[int]]:
        """Token ids of all prompts; those that were sent as ids stay as they are.

        Raises InvalidRequest for texts that leave no room for output, unless they may have any length, and
        ServiceUnavailable.
        """
        tokenizer, limits = self.tokenizer(service), self.limits(service)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        if any_length:
            return (await tokenizer.encode_texts(texts, add_special_tokens)).tokens
        encoded = await tokenizer.encode_texts(texts, add_special_tokens, limits.max_total_tokens - 1)
        if encoded.at_least is not None:
            check_prompt_length(limits, service, encoded.at_least, at_least=True)
        return encoded.tokens


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], **documented: Any) -> None:
    """Route GET and HEAD; the web server leaves out the body for HEAD."""
    app.get(path, **documented)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)


def json_response(value: Struct) -> Response:
    """``value`` as the body of a 200."""
    return Response(encode(value), media_type="application/json")


def _body_bytes(info: Limits) -> int:
    """The largest body to read; it follows from the longest context of all services."""
    longest = max((limits.max_total_tokens for limits in info.services.values()), default=0)
    return max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * longest)
