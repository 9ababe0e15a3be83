"""The JSON of chat completions, full or as chunks of a stream."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from shoal.core import FinishReason
from shoal.frontend.reader import Delta
from shoal.serve.openai.logprobs import LogprobFormatter
from shoal.serve.openai.response_bodies import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FinishReasonName,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    encode,
)
from shoal.serve.openai.response_extras import ResponseExtras
from shoal.serve.openai.response_formats import Output, StreamUsage, finish_reason
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, OutputParser, Piece, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParsing:
    """How the outputs of a chat are read."""

    parser: Callable[[], OutputParser]
    """A new parser for an output."""
    calls: bool
    """Whether there may be calls of tools."""
    call_id: Callable[[], str]
    """A new id for a call."""
    include_reasoning: bool = True
    """Whether reasoning is shown."""

    def shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        """``pieces`` without what the client does not want."""
        return [p for p in pieces if self.include_reasoning or not isinstance(p, Reasoning)]


@dataclass(slots=True)
class _Choice:
    """A choice that is streamed."""

    parser: OutputParser
    calls: int = 0


@dataclass(slots=True)
class _Message:
    """A message that is put together from pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Sequence[Piece], call_id: Callable[[], str]) -> "_Message":
        message = cls()
        for piece in pieces:
            match piece:
                case Content():
                    message.content += piece.text
                case Reasoning():
                    message.reasoning += piece.text
                case CallBegin():
                    message.calls.append(ToolCall(call_id(), CalledFunction(piece.name, "")))
                case CallArguments():
                    message.calls[-1].function.arguments += piece.text
        return message

    def written(self) -> ChatMessage:
        return ChatMessage(
            self.content or (None if self.calls or self.reasoning else ""),
            tool_calls=self.calls or UNSET,
            reasoning_content=self.reasoning or UNSET,
        )


class ChatFormat:
    """Chat completions."""

    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: LogprobFormatter | None,
        usage: StreamUsage,
        presentation: ResponseExtras,
        reading: ChatParsing,
    ) -> None:
        self._header = (request_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage
        self._shown = presentation
        self._reading = reading
        self._choices: dict[int, _Choice] = {}

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """First the role, then text and calls, then the finish reason."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._reading.parser())
            # With tools there may be no content at all, which is null.
            content = None if self._reading.calls else ""
            begin = ChatChunkChoice(index, ChatDelta(role="assistant", content=content))
            yield self._chunk(begin, usage, self._shown.prompt_token_ids(index))
        pieces = choice.parser.push(delta.text)
        if delta.finish is not None:
            pieces += choice.parser.finish(_is_cut(delta))
        deltas = [self._delta(choice, piece) for piece in self._reading.shown(pieces)]
        logprobs = self._logprobs.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        ids = self._shown.token_ids(delta.tokens)
        if (logprobs or ids) and not deltas:
            deltas = [ChatDelta(content="")]
        for chat_delta in deltas:
            yield self._chunk(ChatChunkChoice(index, chat_delta, logprobs, token_ids=ids), usage)
            logprobs, ids = None, UNSET
        if delta.finish is not None:
            reason = _finish_reason(delta, choice.calls > 0, choice.parser)
            last = ChatChunkChoice(index, ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
            yield self._chunk(last, usage)

    def _delta(self, choice: _Choice, piece: Piece) -> ChatDelta:
        match piece:
            case Content():
                return ChatDelta(content=piece.text)
            case Reasoning():
                return ChatDelta(reasoning_content=piece.text)
            case CallBegin():
                choice.calls += 1
                function = FunctionDelta("", piece.name)
                call = ToolCallDelta(choice.calls - 1, function, self._reading.call_id(), "function")
                return ChatDelta(tool_calls=[call])
            case CallArguments():
                return ChatDelta(tool_calls=[ToolCallDelta(choice.calls - 1, FunctionDelta(piece.text))])

    def _chunk(
        self, choice: ChatChunkChoice, usage: Usage, prompt_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        shown = self._usage.in_chunk(usage)
        return encode(ChatChunk(*self._header, [choice], shown, prompt_token_ids=prompt_ids))

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """Token counts, without choices."""
        return encode(ChatChunk(*self._header, [], usage)) if self._usage.final_chunk else None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """One message for each choice."""
        choices = []
        for index, output in enumerate(outputs):
            parser = self._reading.parser()
            pieces = parser.push(output.text) + parser.finish(_is_cut(output))
            message = _Message.of(self._reading.shown(pieces), self._reading.call_id)
            logprobs = self._logprobs.chat(output.logprobs) if self._logprobs else None
            reason = _finish_reason(output, bool(message.calls), parser)
            ids = self._shown.token_ids(output.tokens)
            choices.append(ChatChoice(index, message.written(), logprobs, reason, output.stop_reason, ids))
        response = ChatCompletion(
            *self._header,
            choices,
            usage,
            prompt_token_ids=self._shown.prompt_token_ids(0),
            prompt_logprobs=self._shown.prompt_logprobs(outputs[0].prompt_logprobs),
        )
        return encode(response)


def _is_cut(ended: Delta | Output) -> bool:
    """Whether something else than the model has ended the output."""
    return ended.finish is FinishReason.LENGTH or ended.stop_reason is not None


def _finish_reason(ended: Delta | Output, calls: bool, parser: OutputParser) -> FinishReasonName:
    if calls and ended.finish is FinishReason.STOP and not (_is_cut(ended) and parser.ends_in_call):
        return "tool_calls"
    return finish_reason(ended.finish)
