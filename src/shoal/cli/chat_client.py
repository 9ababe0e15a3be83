"""Clients of ``shoal chat``: over HTTP to a running server, or to an engine in a child process."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import httpx

from shoal.cli.http_client import auth_headers, base_url, connection_problem, error_code, error_message
from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.options import EnginePlan
from shoal.cluster.router.router import Router
from shoal.core import ConfigError, EngineDied, InvalidRequest, QueueFull, Service
from shoal.engine import EngineOptions
from shoal.frontend.sampling_defaults import with_sampling_defaults
from shoal.models import Progress, Tokenizer, resolve_service

Message = dict[str, str]

_KEY_SOURCE = "--api-key or SHOAL_API_KEY gives it"


class ChatClient(Protocol):
    @property
    def name(self) -> str:
        """The name of the service."""

    def reply(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> AsyncIterator[str]:
        """Stream the reply as text; ``sampling``: the parameters that the user set, by name.

        Raises InvalidRequest or QueueFull if the request is rejected, EngineDied if the engine is gone.
        """

    async def close(self) -> None:
        """Close the connection or the engine."""


class ServerChatClient:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    @classmethod
    async def open(cls, url: str, model: str | None, api_key: str | None = None) -> "ServerChatClient":
        """Connect to the server at ``url``; without ``model``, to its first service.

        Raises ConfigError for an unknown service or a wrong key, EngineDied if there is no server.
        """
        timeout = httpx.Timeout(300.0, connect=10.0)
        headers = auth_headers(api_key, _KEY_SOURCE)
        try:
            client = httpx.AsyncClient(base_url=base_url(url), timeout=timeout, headers=headers)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url}: {error}") from None
        try:
            response = await client.get("/v1/models")
            if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise ConfigError(f"{url}: {error_message(response)} (here {_KEY_SOURCE})")
            if response.status_code != httpx.codes.OK:
                raise EngineDied(f"{url} answered with status {response.status_code}: is it a Shoal server?")
            names = [card["id"] for card in response.json()["data"]]
        except httpx.UnsupportedProtocol as error:
            await client.aclose()
            raise ConfigError(f"--url {url}: {error}") from None
        except (httpx.HTTPError, ExceptionGroup, OverflowError, ValueError, KeyError, TypeError) as error:
            await client.aclose()
            raise EngineDied(
                f"no server at {url} ({connection_problem(error)}); start one with `shoal serve smollm2`"
            ) from error
        except (ConfigError, EngineDied):
            await client.aclose()
            raise
        if not names or model not in (None, *names):
            await client.aclose()
            missing = "no service" if model is None else f"no service {model!r}"
            raise ConfigError(f"{url} has {missing}; it has: {', '.join(names) or 'none'}")
        return cls(client, model or names[0])

    @property
    def name(self) -> str:
        return self._model

    async def reply(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> AsyncIterator[str]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            **sampling,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _rejection(response)
                async for chunk in _stream_chunks(response):
                    if piece := _chunk_text(chunk):
                        yield piece
        except UnicodeEncodeError as error:
            raise InvalidRequest("the messages are not UTF-8 text") from error
        except (httpx.HTTPError, RuntimeError) as error:
            raise EngineDied(f"the server broke off: {error or type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()


class EngineChatClient:
    def __init__(self, router: Router, service: Service, tokenizer: Tokenizer) -> None:
        self._router = router
        self._service = service
        self._tokenizer = tokenizer

    @classmethod
    async def open(
        cls, options: EngineOptions, on_download: Progress, on_load: Callable[[str], None]
    ) -> "EngineChatClient":
        """Start an engine for the service of ``options``; raises InvalidRequest without a chat template."""
        [service] = options.services
        folder = resolve_service(service, on_download)
        [service] = with_sampling_defaults([service], {service.name: folder})
        tokenizer = Tokenizer.from_folder(folder, service.chat_template)
        _ = tokenizer.chat_template  # raises if there is none, before the weights are loaded
        router = await Router.start(
            [EnginePlan(name="0", options=options)],
            {service.name: folder},
            {service.name: tokenizer},
            LocalBackend(None, 0),
            progress=on_load,
        )
        return cls(router, service, tokenizer)

    @property
    def name(self) -> str:
        return self._service.name

    async def reply(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> AsyncIterator[str]:
        prompt = self._tokenizer.apply_chat_template(messages)
        params = self._service.sampling.params(sampling)
        stream = await self._router.submit(self._service.name, prompt, params)
        async with stream:
            async for delta in stream:
                if delta.text:
                    yield delta.text

    async def close(self) -> None:
        await self._router.close()


def _rejection(response: httpx.Response) -> Exception:
    message = error_message(response)
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return QueueFull(message, float(response.headers.get("Retry-After", 1)))
    if response.status_code < 500:
        return InvalidRequest(message, code=error_code(response))
    return EngineDied(message)


async def _stream_chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to ``[DONE]``.

    Raises RuntimeError with the server's message if an event is an error.
    """
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk


def _chunk_text(chunk: dict[str, Any]) -> str:
    """The new text in a streamed chunk."""
    pieces = []
    for choice in chunk.get("choices", ()):
        pieces.append((choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)
