"""What the endpoints share: the services, their tokenizers, reading bodies, and running generations."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from msgspec import Struct
from starlette.responses import Response

import shoal
from shoal.core import InvalidRequest, Service
from shoal.engine.validation import Limits
from shoal.serve.backend import Backend, TextCodec
from shoal.serve.errors import MODEL_NOT_FOUND
from shoal.serve.exchange import exchange_of
from shoal.serve.lifecycle import Lifecycle
from shoal.serve.metrics import ServerMetrics
from shoal.serve.options import ServerOptions
from shoal.serve.parse import Body, parse_body, parse_bytes
from shoal.serve.prompts import encode_prompt
from shoal.serve.responses import ModelCard, encode
from shoal.serve.workers import Workers

# Prompts with more characters than this are tokenised in a thread, so that streams go on meanwhile.
_LONG_TEXT_CHARACTERS = 1024
_MAX_TOKENISER_THREADS = 2
# A token is about 4 bytes of text, and JSON may escape a character with 6 or 12.
_BODY_BYTES_PER_TOKEN = 64
_MIN_BODY_BYTES = 2**20
# Most characters that a chat template may write for each byte of the largest body.
_TEMPLATE_GROWTH = 2


class Api:
    """What the endpoints share. ``tokenizers`` are by service name."""

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
        self.tokenizers = tokenizers
        """By service name."""
        self.lifecycle = lifecycle
        """Whether the server drains."""
        self.workers = workers
        """Run long work on client input outside the event loop."""
        build = {
            "version": shoal.__version__,
            "kernels": backend.info.kernels,
            "device": backend.info.device,
        }
        self.metrics = ServerMetrics(services, build, options.vllm_metrics)
        """What the server measures itself."""
        self.max_body_bytes = options.max_body_bytes or _body_bytes(backend.info)
        """The largest body that is read."""
        self._parse_lock = asyncio.Lock()
        self._tokeniser_threads = CapacityLimiter(_MAX_TOKENISER_THREADS)
        created = int(time.time())
        self.cards = {
            service.name: ModelCard(
                service.name,
                created,
                backend.info.services[service.name].max_total_tokens,
                service.sampling.over({}),
            )
            for service in services
        }
        """The services by name, in the order of the configuration."""

    def visible_cards(self, request: Request) -> dict[str, ModelCard]:
        """The services that the API key of ``request`` may use, by name."""
        key = exchange_of(request.scope).key
        return self.cards if key is None else {n: card for n, card in self.cards.items() if key.may_use(n)}

    def card(self, request: Request, model: str, param: str | None) -> ModelCard:
        """The service called ``model``.

        Raises an InvalidRequest (404) about ``param`` if there is none, and ServiceNotAllowed if the API key
        of ``request`` may not use it.
        """
        card = self.cards.get(model)
        if card is None:
            raise InvalidRequest(
                f"model {model!r} is not served here; available: {', '.join(self.visible_cards(request))}",
                param=param,
                code=MODEL_NOT_FOUND,
            )
        exchange = exchange_of(request.scope)
        exchange.service = model
        if exchange.key:
            exchange.key.check_service(model)
        return card

    async def body(self, request: Request, body_type: type[Body]) -> Body:
        """The body of ``request``, which counts for the rate of its API key.

        Raises RateLimited, and the errors of ``parse_body``.
        """
        if key := exchange_of(request.scope).key:
            key.start_request(time.monotonic())
        return await parse_body(
            request, body_type, self.max_body_bytes, self.backend.info, self.workers, self._parse_lock
        )

    async def parse(self, raw: bytes, body_type: type[Body]) -> Body:
        """A body that was made of another; raises the errors of ``parse_bytes``."""
        return await parse_bytes(raw, body_type, self.backend.info, self.workers, self._parse_lock)

    async def encode_cut(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        most: int | None,
        output_tokens: int,
    ) -> list[list[int]]:
        """The same as ``encode``, of each prompt the last ``most`` tokens.

        most: None: all; -1: as many as leave room for ``output_tokens``.
        """
        tokens = await self.encode(service, prompts, add_special_tokens, any_length=most is not None)
        if most is None:
            return tokens
        if most == -1:
            most = self.cards[service].max_model_len - output_tokens
        return [own[max(0, len(own) - most) :] for own in tokens]

    async def encode(
        self,
        service: str,
        prompts: Sequence[str] | Sequence[list[int]],
        add_special_tokens: bool,
        *,
        any_length: bool = False,
    ) -> list[list[int]]:
        """Token ids of all prompts; those that were sent as ids stay as they are.

        Raises InvalidRequest for texts that leave no room for output, unless they may have any length.
        """
        tokenizer = self.tokenizers[service]
        limits = self.backend.info.services[service]

        def encode_all() -> list[list[int]]:
            return [encode_one(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        def encode_one(text: str) -> list[int]:
            if any_length:
                return tokenizer.encode(text, add_special_tokens)
            return encode_prompt(tokenizer, limits, service, text, add_special_tokens)

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= _LONG_TEXT_CHARACTERS:
            return encode_all()
        return await to_thread.run_sync(encode_all, limiter=self._tokeniser_threads)


def json_response(value: Struct) -> Response:
    """``value`` as the body of a 200."""
    return Response(encode(value), media_type="application/json")


def _body_bytes(info: Limits) -> int:
    """The largest body to read; it follows from the longest context of all services."""
    longest = max(limits.max_total_tokens for limits in info.services.values())
    return max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * longest)
