"""The endpoints of vLLM that tokenise: /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import cast

from anyio import to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.core import InvalidRequest
from shoal.serve.api import Api, json_response
from shoal.serve.chats import chat_text
from shoal.serve.further_bodies import DetokenizeBody, TokenizeBody
from shoal.serve.openapi import fails, returns, takes
from shoal.serve.responses import Detokenized, Tokenized
from shoal.serve.tool_fields import Json


class TokenEndpoints:
    """Text and chats to token ids, and back."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, endpoint, response, body in (
            ("/tokenize", self.tokenize, Tokenized, TokenizeBody),
            ("/detokenize", self.detokenize, Detokenized, DetokenizeBody),
        ):
            documented = returns(response, response.__doc__ or "") | fails(400, 404, 413, 415)
            app.post(path, responses=documented, openapi_extra=takes(body))(endpoint)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body = await self._api.body(request, TokenizeBody)
        card = self._api.card(request, body.model, "model")
        conversation, text = body.conversation(), body.prompt or ""
        if conversation is not None:
            tools = cast("list[Json]", body.tools or [])
            template = self._api.tokenizer(body.model).chat_template.chosen(bool(tools))
            layout = body.layout(template.source, thinks=True)
            text = await chat_text(self._api, body.model, conversation, layout, tools)
        adds = conversation is None if body.add_special_tokens is None else body.add_special_tokens
        (tokens,) = await self._api.encode(body.model, [text], adds, any_length=True)
        strings = None
        if body.return_token_strs:
            strings = await to_thread.run_sync(self._strings, body.model, tokens)
        return json_response(Tokenized(len(tokens), card.max_model_len, tokens, strings))

    def _strings(self, service: str, tokens: Sequence[int]) -> list[str]:
        token_bytes = self._api.tokenizer(service).token_bytes
        return [token_bytes(token).decode(errors="replace") for token in tokens]

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await self._api.body(request, DetokenizeBody)
        self._api.card(request, body.model, "model")
        limit = self._api.limits(body.model).vocab_size
        if body.tokens and max(body.tokens) >= limit:
            raise InvalidRequest(
                f"tokens: {max(body.tokens)} is outside the vocabulary of {body.model}; "
                f"token ids go from 0 to {limit - 1}",
                param="tokens",
            )
        decode = self._api.tokenizer(body.model).decode
        # A long list takes its time, and other clients shall not wait for it.
        return json_response(Detokenized(await to_thread.run_sync(decode, body.tokens, False)))
