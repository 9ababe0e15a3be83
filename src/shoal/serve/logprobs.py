"""Log-probabilities of tokens in the two shapes of OpenAI's API."""

import functools
from collections.abc import Sequence

from shoal.core import TokenLogprobs
from shoal.serve.backend import TextCodec
from shoal.serve.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

# JSON has no infinity; a token that cannot be sampled gets this, as in OpenAI's API.
_IMPOSSIBLE = -9999.0
_TOKEN_ID = "token_id:{}"


class LogprobFormatter:
    """Formats the log-probabilities of one response, with the ``num_top`` likeliest tokens.

    as_token_ids: tokens are named by their ids. skip_special_tokens: these have no text.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        num_top: int,
        *,
        as_token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._bytes = functools.cache(tokenizer.token_bytes)
        self._length = functools.cache(
            lambda token: 0 if skip_special_tokens and _is_special(tokenizer, token) else self._count(token)
        )
        self._offsets: dict[int, int] = {}

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Tokens of a message; a part of a character is shown as U+FFFD, but its bytes are exact."""
        return ChatLogprobs([self._chat_token(entry) for entry in entries])

    def _chat_token(self, entry: TokenLogprobs) -> ChatTokenLogprob:
        top = [
            TopLogprob(self._show(token), _finite(logprob), list(self._bytes(token)))
            for token, logprob in entry.top[: self._num_top]
        ]
        return ChatTokenLogprob(
            self._show(entry.token), _finite(entry.logprob), list(self._bytes(entry.token)), top
        )

    def _show(self, token: int) -> str:
        if self._as_token_ids:
            return _TOKEN_ID.format(token)
        return self._bytes(token).decode("utf-8", "replace")

    def completion(
        self, index: int, entries: Sequence[TokenLogprobs], first: Sequence[int] = ()
    ) -> CompletionLogprobs:
        """The next tokens of choice ``index``; a part of a character is shown as ``bytes:\\xNN``.

        first: a token before them that has no log-probability, the first of an echoed prompt.
        """
        known = [*first, *(entry.token for entry in entries)]
        offsets = []
        for token in known:
            offset = self._offsets.get(index, 0)
            offsets.append(offset)
            self._offsets[index] = offset + self._length(token)
        # The token itself is always among them, as in OpenAI and vLLM.
        top = [
            {
                self._escape(token): _finite(logprob)
                for token, logprob in (*entry.top[: self._num_top], (entry.token, entry.logprob))
            }
            for entry in entries
        ]
        nothing = [None] * len(first)
        return CompletionLogprobs(
            [self._escape(token) for token in known],
            [*nothing, *(_finite(entry.logprob) for entry in entries)],
            [*nothing, *top] if self._num_top else None,
            offsets,
        )

    def _count(self, token: int) -> int:
        """Characters that a token adds to the text."""
        return len(self._bytes(token).decode("utf-8", "ignore"))

    def _escape(self, token: int) -> str:
        if self._as_token_ids:
            return _TOKEN_ID.format(token)
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_special(tokenizer: TextCodec, token: int) -> bool:
    """Whether a token has no text because it is special."""
    return not tokenizer.decode([token]) and bool(tokenizer.decode([token], skip_special_tokens=False))


def prompt_logprobs(tokenizer: TextCodec, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Those of a prompt in vLLM's shape; ``entries`` begin with its second token."""
    text = functools.cache(lambda token: tokenizer.token_bytes(token).decode("utf-8", "replace"))
    formatted: PromptLogprobs = [None]
    for entry in entries:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        formatted.append(
            {
                str(token): PromptLogprob(_finite(logprob), rank, text(token))
                for token, (logprob, rank) in ranked.items()
            }
        )
    return formatted


def _finite(logprob: float) -> float:
    # Compared in this order so that NaN becomes a number, too.
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE
