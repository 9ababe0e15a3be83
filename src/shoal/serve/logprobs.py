"""Log-probabilities of tokens in the two shapes of OpenAI's API."""

import functools
from collections.abc import Sequence

from shoal.core import TokenLogprobs
from shoal.serve.backend import TextCodec
from shoal.serve.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

# JSON has no infinity; a token that cannot be sampled gets this, as in OpenAI's API.
_IMPOSSIBLE = -9999.0


class LogprobFormatter:
    """Formats the log-probabilities of one response, with the ``num_top`` likeliest tokens."""

    def __init__(self, tokenizer: TextCodec, num_top: int) -> None:
        self._num_top = num_top
        self._bytes = functools.cache(tokenizer.token_bytes)
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
        return self._bytes(token).decode("utf-8", "replace")

    def completion(self, index: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens of choice ``index``; a part of a character is shown as ``bytes:\\xNN``."""
        tokens = [self._escape(entry.token) for entry in entries]
        offsets = []
        for entry in entries:
            offset = self._offsets.get(index, 0)
            offsets.append(offset)
            self._offsets[index] = offset + len(self._bytes(entry.token).decode("utf-8", "ignore"))
        # The sampled token is always among them, as in OpenAI and vLLM.
        top = [
            {
                self._escape(token): _finite(logprob)
                for token, logprob in (*entry.top[: self._num_top], (entry.token, entry.logprob))
            }
            for entry in entries
        ]
        return CompletionLogprobs(
            tokens, [_finite(entry.logprob) for entry in entries], top if self._num_top else None, offsets
        )

    def _escape(self, token: int) -> str:
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    # Compared in this order so that NaN becomes a number, too.
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE
