"""The endpoints /v1/completions and /v1/chat/completions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from shoal.core import InvalidRequest, SamplingParams
from shoal.core.sampling import MAX_CHOICES
from shoal.core.service import NO_GOALS
from shoal.serve.api import Api
from shoal.serve.backend import TextCodec
from shoal.serve.generation import GenerationRequest
from shoal.serve.generation_response import GenerationResponse
from shoal.serve.http.request_context import context_of
from shoal.serve.openai.chat_format import ChatFormat
from shoal.serve.openai.chat_prompt import PreparedChat, prepare_chat
from shoal.serve.openai.error_field_names import client_field_names
from shoal.serve.openai.logprobs import LogprobFormatter, prompt_logprobs
from shoal.serve.openai.request_bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from shoal.serve.openai.response_bodies import ChatChunk, ChatCompletion, Completion
from shoal.serve.openai.response_extras import ResponseExtras
from shoal.serve.openai.response_formats import CompletionFormat, Format
from shoal.serve.openapi import fails, returns, streams, takes


class GenerationEndpoints:
    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, app: FastAPI) -> None:
        for path, endpoint, full, chunk, body in (
            ("/v1/completions", self.completions, Completion, Completion, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, ChatCompletion, ChatChunk, ChatBody),
        ):
            responses = returns(full, "The response, full or as a stream.")
            responses[200]["content"].update(streams(chunk))
            errors = fails(400, 404, 413, 415, 429, 500, 503)
            app.post(path, responses=responses | errors, openapi_extra=takes(body))(endpoint)

    async def completions(self, request: Request) -> Response:
        """Complete one prompt or several."""
        arrival_ns = time.monotonic_ns()
        return await self.complete(request, await self._api.body(request, CompletionBody), arrival_ns)

    async def complete(
        self, request: Request, body: CompletionBody, arrival_ns: int, whole_context: bool = False
    ) -> GenerationResponse:
        """Complete the prompts of ``body``.

        whole_context: without ``max_tokens``, generate as many tokens as fit, rather than 16.
        """
        card = self._api.card(request, body.model, "model")
        prompts = body.prompts()
        _check_choices(len(prompts), body.n or 1)
        tokens = await self._encode(body, prompts, body.add_special_tokens is not False)
        longest_output = card.max_model_len - max(map(len, tokens))
        default_max_tokens = max(1, min(longest_output, max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)))
        default = None if whole_context else default_max_tokens
        sampling = body.sampling(card.sampling_defaults, default)
        echoed = partial(self._echo, body, tokens) if body.echo else None
        return await self._generate(
            request, body, "cmpl", tokens, sampling, arrival_ns, echoed=echoed, hide_output=body.only_echoes
        )

    async def chat_completions(self, request: Request) -> Response:
        """Write the next message of a chat."""
        arrival_ns = time.monotonic_ns()
        return await self.chat(request, await self._api.body(request, ChatBody), arrival_ns)

    async def chat(self, request: Request, body: ChatBody, arrival_ns: int) -> GenerationResponse:
        """Generate the next message of the chat in ``body``."""
        card = self._api.card(request, body.model, "model")
        field_names = body.field_names()
        chat = await prepare_chat(
            self._api,
            body.model,
            body.conversation(),
            body.tool_use(),
            body,
            body.sampling(card.sampling_defaults),
            field_names,
        )
        with client_field_names(field_names):
            # The template writes every special token itself.
            tokens = await self._encode(body, [chat.text], add_special_tokens=False)
        return await self._generate(request, body, "chatcmpl", tokens, chat.sampling, arrival_ns, chat=chat)

    def _echo(self, body: CompletionBody, tokens: Sequence[Sequence[int]], number: int) -> str:
        """The text of a prompt: as it was sent, or decoded if it was sent as token ids or truncated."""
        prompt = body.prompts()[number]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return self._api.tokenizer(body.model).decode(
            tokens[number], skip_special_tokens=body.skip_special_tokens is not False
        )

    async def _encode(
        self, body: GenerationBody, prompts: Sequence[str] | Sequence[list[int]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of the prompts, truncated as the body says."""
        return await self._api.encode_truncated(
            body.model,
            prompts,
            add_special_tokens,
            body.truncate_prompt_tokens,
            max(1, body.output_limit() or 1),
        )

    async def _generate(
        self,
        http_request: Request,
        body: GenerationBody,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        arrival_ns: int,
        *,
        chat: PreparedChat | None = None,
        echoed: Callable[[int], str] | None = None,
        hide_output: bool = False,
    ) -> GenerationResponse:
        tokenizer = self._api.tokenizer(body.model)
        if body.bad_words:
            banned = await _banned_sequences(tokenizer, body.bad_words)
            sampling = replace(sampling, banned_sequences=banned)
        slo = NO_GOALS if body.slo is None else body.slo.slo()
        request = GenerationRequest(
            id=f"{prefix}-{context_of(http_request.scope).id}",
            service=body.model,
            prompts=prompts,
            sampling=sampling,
            arrival_ns=arrival_ns,
            slo=slo,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            client=context_of(http_request.scope).client,
            pace_s=self._api.pace_s(body.model, slo),
            hide_output=hide_output,
            field_names=body.field_names() if chat is None else chat.field_names,
        )
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = LogprobFormatter(
                tokenizer,
                sampling.logprobs,
                as_token_ids=bool(body.return_tokens_as_token_ids),
                skip_special_tokens=sampling.skip_special_tokens,
            )
        extras = ResponseExtras(
            prompts=prompts,
            n=sampling.n,
            echoed=echoed,
            returns_token_ids=bool(body.return_token_ids),
            format_prompt=None if body.prompt_logprobs is None else partial(prompt_logprobs, tokenizer),
        )
        usage = body.stream_usage()
        format: Format
        if chat is None:
            format = CompletionFormat(request.id, body.model, logprobs, usage, extras)
        else:
            format = ChatFormat(request.id, body.model, logprobs, usage, extras, chat.parsing)
        return GenerationResponse(
            request, format, bool(body.stream), self._api.backend, self._api.metrics, self._api.lifecycle
        )


async def _banned_sequences(tokenizer: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that must not occur in an output: at the beginning of a text, and after a space."""
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
    encoded = (await tokenizer.encode_texts(spellings, add_special_tokens=False)).tokens
    return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with n={n} are {prompts * n} outputs; one request can have {MAX_CHOICES}",
            param="n",
        )
