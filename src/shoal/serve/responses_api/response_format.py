"""Writes responses of /v1/responses, full or as stream events."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from shoal.core import FinishReason, SamplingParams
from shoal.frontend.reader import Delta
from shoal.serve.openai.chat_format import ChatParsing
from shoal.serve.openai.logprobs import LogprobFormatter
from shoal.serve.openai.response_bodies import (
    ChatTokenLogprob,
    ErrorBody,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
    Usage,
    encode,
)
from shoal.serve.openai.response_formats import Output
from shoal.serve.responses_api.output_items import OutputItems
from shoal.serve.responses_api.request_body import ResponsesBody


class ResponsesFormat:
    """Writes one response. Its stream has an event for every step; the last event has the whole response.

    token_bytes: the bytes of a token.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponsesBody,
        sampling: SamplingParams,
        parsing: ChatParsing,
        logprobs: LogprobFormatter | None,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._response = _initial_response(response_id, body, sampling)
        self._parsing = parsing
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._tokens: list[int] = []
        self._items = OutputItems(parsing.call_id)
        self._parser = parsing.parser()
        self._finish: FinishReason | None = None
        self._events = 0

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        if self._events == 0:
            for name in ("created", "in_progress"):
                yield self._event({"type": f"response.{name}", "response": self._response})
        for event in self._add_delta(delta):
            yield self._event(event)

    def _add_delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._tokens += delta.tokens
        pieces = self._parser.push(delta.text)
        if delta.finish is not None:
            pieces += self._parser.finish(delta.finish is FinishReason.LENGTH)
        logprobs: list[ChatTokenLogprob] = []
        if self._logprobs is not None:
            logprobs = self._logprobs.chat(delta.logprobs or ()).content
        yield from self._items.add(self._parsing.visible(pieces), logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
            yield from self._items.close("incomplete" if self._is_cut else "completed")

    @property
    def _is_cut(self) -> bool:
        """Whether a token limit ended the output."""
        return self._finish is FinishReason.LENGTH

    def _event(self, event: dict[str, Any]) -> bytes:
        self._events += 1
        return encode({"type": event["type"], "sequence_number": self._events - 1, **event})

    def usage_chunk(self, usage: Usage) -> bytes:
        name = "incomplete" if self._is_cut else "completed"
        return self._event({"type": f"response.{name}", "response": self._finished(usage)})

    def error(self, error: ErrorBody) -> bytes:
        """The error event, which ends the stream."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event({"type": "error", **fields})

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        (output,) = outputs
        whole = Delta(
            choice=0,
            text=output.text,
            tokens=tuple(output.tokens),
            logprobs=tuple(output.logprobs),
            finish=output.finish,
        )
        for _ in self._add_delta(whole):
            pass
        return encode(self._finished(usage))

    def _finished(self, usage: Usage) -> ResponseObject:
        response = self._response
        response.output = self._items.items
        response.status = "incomplete" if self._is_cut else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if self._is_cut else None
        response.completed_at = None if self._is_cut else int(time.time())
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._reasoning_tokens()),
            usage.total_tokens,
        )
        return response

    def _reasoning_tokens(self) -> int:
        """Number of output tokens with a part of the reasoning."""
        reasoning = self._items.reasoning.encode()
        if not reasoning:
            return 0
        texts = [self._token_bytes(token) for token in self._tokens]
        begin = max(0, b"".join(texts).find(reasoning))
        ends = accumulate(map(len, texts))
        return sum(
            begin < end and end - len(text) < begin + len(reasoning)
            for text, end in zip(texts, ends, strict=True)
        )


def _initial_response(response_id: str, body: ResponsesBody, sampling: SamplingParams) -> ResponseObject:
    def sent(model: BaseModel | None) -> dict[str, Any]:
        return {} if model is None else model.model_dump(by_alias=True, exclude_none=True)

    text = {"format": {"type": "text"}} | sent(body.text)
    choice = body.tool_choice or "auto"
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=body.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None} | sent(body.reasoning),
        temperature=sampling.temperature,
        text=text,
        tool_choice=choice if isinstance(choice, str) else sent(choice),
        tools=[_tool_fields(tool) for tool in body.tools or ()],
        top_p=sampling.top_p,
        top_logprobs=body.top_logprobs or 0,
        user=body.user,
    )


def _tool_fields(tool: BaseModel) -> dict[str, Any]:
    defaults = {"description": None, "parameters": None, "strict": False}
    return defaults | tool.model_dump(exclude_none=True)
