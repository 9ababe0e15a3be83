"""The endpoints /tokenize and /detokenize, as in vLLM."""

from typing import cast

from fastapi import FastAPI, Request
from msgspec import Raw
from starlette.responses import Response

from shoal.core import InvalidRequest
from shoal.serve.api import Api, json_response
from shoal.serve.openai.chat_fields import Json
from shoal.serve.openai.chat_prompt import chat_text
from shoal.serve.openai.response_bodies import Detokenized, Tokenized
from shoal.serve.openai.token_and_embedding_bodies import DetokenizeBody, TokenizeBody
from shoal.serve.openapi import fails, returns, takes


class TokenEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        for path, endpoint, response, body in (
            ("/tokenize", self.tokenize, Tokenized, TokenizeBody),
            ("/detokenize", self.detokenize, Detokenized, DetokenizeBody),
        ):
            documented = returns(response, response.__doc__ or "") | fails(400, 404, 413, 415, 503)
            app.post(path, responses=documented, openapi_extra=takes(body))(endpoint)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body = await self._api.body(request, TokenizeBody)
        card = self._api.card(request, body.model, "model")
        conversation, text = body.conversation(), body.prompt or ""
        if conversation is not None:
            tools = cast("list[Json]", body.tools or [])
            template = self._api.tokenizer(body.model).chat_template.chosen(bool(tools))
            layout = body.layout(template.source, may_reason=True)
            text = await chat_text(self._api, body.model, conversation, layout, tools)
        add_special_tokens = (
            conversation is None if body.add_special_tokens is None else body.add_special_tokens
        )
        encoded = await self._api.tokenizer(body.model).tokenize(
            text, add_special_tokens, bool(body.return_token_strs)
        )
        # Both are JSON already.
        tokens = cast("list[int]", Raw(encoded.tokens))
        strings = None if encoded.strings is None else cast("list[str]", Raw(encoded.strings))
        return json_response(Tokenized(encoded.count, card.max_model_len, tokens, strings))

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
        return json_response(Detokenized(await self._api.tokenizer(body.model).detokenize(body.tokens)))
