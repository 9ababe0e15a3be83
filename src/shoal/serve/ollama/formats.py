"""Writes responses in Ollama's shapes, from those in OpenAI's."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from shoal.frontend.offline_batch import read_embedding
from shoal.frontend.reader import Delta
from shoal.serve.generation_response import Framing
from shoal.serve.http.request_context import RequestContext
from shoal.serve.openai.response_bodies import Usage, encode, encoded
from shoal.serve.openai.response_formats import Format, Output

JSON_LINES = Framing(
    lambda payload: payload + b"\n", end=b"", media_type=b"application/x-ndjson", comment=b""
)
"""Framing of Ollama's streams: JSON objects, one a line."""

WrapMessage = Callable[[dict[str, Any]], dict[str, Any]]
"""Puts a message into an object of a response."""


class OllamaWriter:
    """Writes the objects of one response."""

    def __init__(self, model: str, context: RequestContext, wrap: WrapMessage) -> None:
        self._model = model
        self._context = context
        self._wrap = wrap

    def line(self, message: dict[str, Any], done: bool) -> dict[str, Any]:
        """An object with an OpenAI message, or a delta of one."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {
            "model": self._model,
            "created_at": now,
            **self._wrap(_to_ollama_message(message)),
            "done": done,
        }

    def last(self, message: dict[str, Any], reason: str, usage: Usage) -> dict[str, Any]:
        """The last object of a response, with token counts, and durations in nanoseconds."""
        context = self._context
        total_ns = time.monotonic_ns() - context.arrival_ns
        first_ns = round((context.first_token_s or 0) * 1e9)
        return self.line(message, done=True) | {
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": total_ns,
            "load_duration": context.load_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(0, first_ns - round((context.queue_s or 0) * 1e9)),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(0, total_ns - first_ns),
        }


class OllamaFormat:
    """Translates an OpenAI format to Ollama's. In a stream, complete tool calls follow the text."""

    def __init__(self, openai: Format, writer: OllamaWriter) -> None:
        self._openai = openai
        self._writer = writer
        self._calls: dict[int, dict[str, Any]] = {}
        self._reason = "stop"

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        """An object for every chunk that has text; at the end, one with all calls."""
        for chunk in self._openai.chunks(index, delta, usage):
            (choice,) = msgspec.json.decode(chunk)["choices"]
            message = choice.get("delta") or {"content": choice.get("text")}
            for call in message.get("tool_calls") or ():
                known = self._calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
                known["id"] = call.get("id") or known.get("id")
                _append_to_call(known["function"], call["function"])
            if message.get("content") or message.get("reasoning_content"):
                text = {key: value for key, value in message.items() if key != "tool_calls"}
                yield encode(self._writer.line(text, done=False))
            if choice["finish_reason"]:
                self._reason = choice["finish_reason"]
                if self._calls:
                    calls = [call for _, call in sorted(self._calls.items())]
                    yield encode(self._writer.line({"tool_calls": calls}, done=False))

    def usage_chunk(self, usage: Usage) -> bytes:
        return encode(self._writer.last({}, self._reason, usage))

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        (choice,) = msgspec.json.decode(self._openai.full(outputs, usage))["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        return encode(self._writer.last(message, choice["finish_reason"], usage))


class OllamaEmbedding:
    """Writes one embedding in the shape of Ollama's older endpoint."""

    def chunks(self, index: int, delta: Delta, usage: Usage) -> Iterator[bytes]:
        return iter(())

    def usage_chunk(self, usage: Usage) -> bytes | None:
        return None

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        (vector,) = self._vectors(outputs)
        return encode({"embedding": vector})

    def _vectors(self, outputs: Sequence[Output]) -> list[list[float]]:
        return [encoded(list(read_embedding(output.embedding or b""))) for output in outputs]


class OllamaEmbeddings(OllamaEmbedding):
    """Writes embeddings of several texts."""

    def __init__(self, model: str, context: RequestContext) -> None:
        self._model = model
        self._context = context

    def full(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """A vector for each text, with token counts and durations in nanoseconds."""
        return encode(
            {
                "model": self._model,
                "embeddings": self._vectors(outputs),
                "total_duration": time.monotonic_ns() - self._context.arrival_ns,
                "load_duration": self._context.load_ns,
                "prompt_eval_count": usage.prompt_tokens,
            }
        )


def _append_to_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    for key in call:
        call[key] += piece.get(key) or ""


def _to_ollama_message(message: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI message, or a delta of one, in Ollama's shape."""
    translated: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if thinking := message.get("reasoning_content"):
        translated["thinking"] = thinking
    if calls := message.get("tool_calls"):
        translated["tool_calls"] = [_to_ollama_call(call, index) for index, call in enumerate(calls)]
    return translated


def _to_ollama_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """A call in Ollama's shape: arguments are an object."""
    function = call["function"]
    return {
        "id": call["id"],
        "function": {"index": index, "name": function["name"], "arguments": _arguments(function)},
    }


def _arguments(function: dict[str, Any]) -> Any:
    """The arguments as an object; {} if the text is incomplete."""
    try:
        return msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return {}


def wrap_chat(message: dict[str, Any]) -> dict[str, Any]:
    """The message in a response of /api/chat."""
    return {"message": message}


def wrap_generate(message: dict[str, Any]) -> dict[str, Any]:
    """The text and reasoning in a response of /api/generate."""
    thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
    return {"response": message["content"], **thinking}
