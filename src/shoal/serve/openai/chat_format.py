"""Writes chat completions, full or as stream chunks: content, reasoning, tool calls, finish reason."""

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
    """How the outputs of a chat are parsed."""

    parser: Callable[[], OutputParser]
    """Makes a parser for one output."""
    calls: bool
    """Whether an output may have tool calls."""
    call_id: Callable[[], str]
    """Makes the id of a tool call."""
    include_reasoning: bool = True
    """Whether reasoning is returned."""

    def visible(self, pieces: Sequence[Piece]) -> list[Piece]:
        """``pieces`` without reasoning that the client does not want."""
        return [p for p in pieces if self.include_reasoning or not isinstance(p, Reasoning)]


@dataclass(slots=True)
class _Choice:
    """State of a streamed choice."""

    parser: OutputParser
    calls: int = 0


@dataclass(slots=True)
class _Message:
    """Builds a message from pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def from_pieces(cls, pieces: Sequence[Piece], call_id: Callable[[], str]) -> "_Message":
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

    def to_chat_message(self) -> ChatMessage:
        return ChatMessage(
            self.content or (None if self.calls or self.reasoning else ""),
            tool_calls=self.calls or UNSET,
            reasoning_content=self.reasoning or UNSET,
        )


class ChatFormat:
    def __init__(
        self,
        request_id: str,
        model: str,
        logprobs: LogprobFormatter | None,
        usage: StreamUsage,
        extras: ResponseExtras,
        parsing: ChatParsing,
    ) -> None:
        self._header = (request_id, int(time.time()), model)
        self._logprobs = logprobs
        self._usage = usage
        self._extras = extras
        self._parsing = parsing
        self._choices: dict[int, _Choice] = {}

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """First the role, then text and calls, then the finish reason."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._parsing.parser())
            # With tools there may be no content, which is null.
            content = None if self._parsing.calls else ""
            begin = ChatChunkChoice(index, ChatDelta(role="assistant", content=content))
            yield self._chunk(begin, usage, self._extras.prompt_token_ids(index))
        pieces = choice.parser.push(delta.text)
        if delta.finish is not None:
            pieces += choice.parser.finish(_is_cut(delta))
        deltas = [self._delta(choice, piece) for piece in self._parsing.visible(pieces)]
        logprobs = self._logprobs.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        ids = self._extras.token_ids(delta.tokens)
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
                call = ToolCallDelta(choice.calls - 1, function, self._parsing.call_id(), "function")
                return ChatDelta(tool_calls=[call])
            case CallArguments():
                return ChatDelta(tool_calls=[ToolCallDelta(choice.calls - 1, FunctionDelta(piece.text))])

    def _chunk(
        self, choice: ChatChunkChoice, usage: Usage, prompt_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        chunk_usage = self._usage.in_chunk(usage)
        return encode(ChatChunk(*self._header, [choice], chunk_usage, prompt_token_ids=prompt_ids))

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """A chunk with token counts and no choices."""
        return encode(ChatChunk(*self._header, [], usage)) if self._usage.final_chunk else None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        choices = []
        for index, output in enumerate(outputs):
            parser = self._parsing.parser()
            pieces = parser.push(output.text) + parser.finish(_is_cut(output))
            message = _Message.from_pieces(self._parsing.visible(pieces), self._parsing.call_id)
            logprobs = self._logprobs.chat(output.logprobs) if self._logprobs else None
            reason = _finish_reason(output, bool(message.calls), parser)
            ids = self._extras.token_ids(output.tokens)
            choices.append(
                ChatChoice(index, message.to_chat_message(), logprobs, reason, output.stop_reason, ids)
            )
        response = ChatCompletion(
            *self._header,
            choices,
            usage,
            prompt_token_ids=self._extras.prompt_token_ids(0),
            prompt_logprobs=self._extras.prompt_logprobs(outputs[0].prompt_logprobs),
        )
        return encode(response)


def _is_cut(ended: Delta | Output) -> bool:
    """Whether a limit or a stop string, not the model, ended the output."""
    return ended.finish is FinishReason.LENGTH or ended.stop_reason is not None


def _finish_reason(ended: Delta | Output, calls: bool, parser: OutputParser) -> FinishReasonName:
    if calls and ended.finish is FinishReason.STOP and not (_is_cut(ended) and parser.ends_in_call):
        return "tool_calls"
    return finish_reason(ended.finish)
