"""Writes answers of /v1/messages, full or as stream events."""

from collections.abc import Iterator, Sequence

from shoal.core import FinishReason
from shoal.frontend.reader import Delta
from shoal.serve.anthropic.output_blocks import OutputBlocks
from shoal.serve.openai.chat_fields import Json
from shoal.serve.openai.chat_format import ChatParsing
from shoal.serve.openai.response_bodies import Usage, encode
from shoal.serve.openai.response_formats import Output


class MessageFormat:
    """Writes one answer."""

    def __init__(self, message_id: str, model: str, parsing: ChatParsing) -> None:
        self._id, self._model = message_id, model
        self._parsing = parsing
        self._parser = parsing.parser()
        self._blocks = OutputBlocks(parsing.call_id)
        self._started = False
        self._finish: FinishReason | None = None
        self._stop_sequence: str | None = None

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield encode({"type": "message_start", "message": self._message(usage)})
        for event in self._add_delta(delta):
            yield encode(event)

    def usage_chunk(self, usage: Usage) -> bytes:
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return encode({"type": "message_delta", "delta": end, "usage": _counts(usage)})

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        (output,) = outputs
        whole = Delta(choice=0, text=output.text, finish=output.finish, stop_reason=output.stop_reason)
        for _ in self._add_delta(whole):
            pass
        return encode(self._message(usage))

    def _add_delta(self, delta: Delta) -> Iterator[Json]:
        pieces = self._parser.push(delta.text)
        if delta.finish is not None:
            pieces += self._parser.finish(delta.finish is FinishReason.LENGTH)
        yield from self._blocks.add(self._parsing.visible(pieces))
        if delta.finish is not None:
            self._finish = delta.finish
            self._stop_sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            yield from self._blocks.close()

    @property
    def _stop_reason(self) -> str | None:
        """Why the answer ended; None: it has not."""
        if self._finish is None:
            return None
        if self._finish is FinishReason.LENGTH:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.has_calls else "end_turn"

    def _message(self, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _counts(usage),
        }


def _counts(usage: Usage) -> dict[str, int]:
    """Token counts, of which ``input_tokens`` leaves out those found in the cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
