"""Formats log-probabilities of tokens: chats, completions, and vLLM's prompt_logprobs."""

import functools
from collections.abc import Sequence

from shoal.core import TokenLogprobs
from shoal.serve.backend import TextCodec
from shoal.serve.openai.response_bodies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    encoded,
)
from shoal.serve.openai.text_offsets import TextOffsets

# JSON has no infinity; an impossible token gets this value, as in OpenAI's API.
_IMPOSSIBLE = -9999.0
_TOKEN_ID = "token_id:{}"


class LogprobFormatter:
    """Formats the log-probabilities of one response, with the ``num_top`` most likely tokens.

    as_token_ids: write ``token_id:42`` instead of the text. skip_special_tokens: special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        num_top: int,
        *,
        as_token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._bytes = functools.cache(tokenizer.token_bytes)
        self._offsets: dict[int, TextOffsets] = {}

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Tokens of a message; a part of a character is written as U+FFFD, but its bytes are exact."""
        return ChatLogprobs([self._chat_token(entry) for entry in entries])

    def _chat_token(self, entry: TokenLogprobs) -> ChatTokenLogprob:
        top = [
            TopLogprob(self._token_text(token), _finite(logprob), list(self._bytes(token)))
            for token, logprob in entry.top[: self._num_top]
        ]
        return ChatTokenLogprob(
            self._token_text(entry.token), _finite(entry.logprob), list(self._bytes(entry.token)), top
        )

    def _token_text(self, token: int) -> str:
        if self._as_token_ids:
            return _TOKEN_ID.format(token)
        return self._bytes(token).decode("utf-8", "replace")

    def completion(
        self,
        index: int,
        entries: Sequence[TokenLogprobs],
        prompt: Sequence[int] = (),
        echo: str | None = None,
    ) -> CompletionLogprobs:
        """The next tokens of choice ``index``; a part of a character is written as ``bytes:\\xNN``.

        echo: the prompt's text, with which the choice begins; ``entries`` then start with the prompt's second
        token, because the first has no log-probability.
        """
        first = prompt[:1] if echo is not None else ()
        token_ids = [*first, *(entry.token for entry in entries)]
        offsets = self._text_offsets(index, token_ids, prompt, echo)
        # The sampled token is always included, as in OpenAI and vLLM.
        top = [
            {
                self._escape(token): _finite(logprob)
                for token, logprob in (*entry.top[: self._num_top], (entry.token, entry.logprob))
            }
            for entry in entries
        ]
        nothing = [None] * len(first)
        return CompletionLogprobs(
            [self._escape(token) for token in token_ids],
            [*nothing, *(_finite(entry.logprob) for entry in entries)],
            [*nothing, *top] if self._num_top else None,
            offsets,
        )

    def _text_offsets(
        self, index: int, tokens: Sequence[int], prompt: Sequence[int], echo: str | None
    ) -> list[int]:
        """Offsets of the tokens in the text of choice ``index``, in characters."""
        offsets = []
        if echo is not None:
            echoed = TextOffsets(self._tokenizer, echo=echo)
            offsets = [echoed.push(token) for token in tokens[: len(prompt)]]
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self._tokenizer,
                context=prompt,
                start=len(echo or ""),
                skip_special_tokens=self._skip_special_tokens,
            )
        return offsets + [self._offsets[index].push(token) for token in tokens[len(offsets) :]]

    def _escape(self, token: int) -> str:
        if self._as_token_ids:
            return _TOKEN_ID.format(token)
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(tokenizer: TextCodec, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """``prompt_logprobs`` in vLLM's shape; ``entries`` begin with the prompt's second token."""
    text = functools.cache(lambda token: tokenizer.token_bytes(token).decode("utf-8", "replace"))
    formatted: PromptLogprobs = [None]
    for entry in entries:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        by_token = {
            str(token): PromptLogprob(_finite(logprob), rank, text(token))
            for token, (logprob, rank) in ranked.items()
        }
        formatted.append(encoded(by_token))
    return formatted


def _finite(logprob: float) -> float:
    # In this order, NaN becomes a number, too.
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE
