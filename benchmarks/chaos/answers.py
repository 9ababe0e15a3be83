"""Sends a request, and normalises the answer for comparison: streamed or not, without ids and times."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos.requests import Request

Json = Any

VOLATILE = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "model", "max_model_len"}
"""Keys whose values differ between answers or configurations."""


class Refused(Exception):
    """An error answer. code: empty if the API has none."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code = status, code


@dataclass
class _Choice:
    """A choice, collected from chunks."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments."""
    lists: dict[str, list[Json]] = field(default_factory=dict)
    """Tokens and log-probabilities."""
    other: dict[str, Json] = field(default_factory=dict)

    def add(self, part: dict[str, Json]) -> None:
        """Append a choice of a chunk or of a whole response."""
        said = part.get("delta") or part.get("message") or {}
        self.text += (said.get("content") or "") + (part.get("text") or "")
        self.reasoning += said.get("reasoning_content") or ""
        for number, call in enumerate(said.get("tool_calls") or ()):
            function = call["function"]
            while len(self.calls) <= call.get("index", number):
                self.calls.append(["", ""])
            of = self.calls[call.get("index", number)]
            of[0] += function.get("name") or ""
            of[1] += function.get("arguments") or ""
        logprobs = part.get("logprobs") or {}
        for name, values in (logprobs | {"token_ids": part.get("token_ids")}).items():
            self.lists.setdefault(name, []).extend(values or ())
        for name in ("finish_reason", "stop_reason", "prompt_logprobs", "prompt_token_ids"):
            if part.get(name) is not None:
                self.other[name] = part[name]

    def written(self) -> Json:
        lists = {name: values for name, values in self.lists.items() if values}
        return {"text": self.text, "reasoning": self.reasoning, "calls": self.calls} | lists | self.other


async def ask(client: httpx.AsyncClient, request: Request, model: str, *, stream: bool) -> Json:
    """The normalised answer of ``model``; raises Refused and httpx.TransportError."""
    body = request.body | {"model": model}
    if request.streams:
        body["stream"] = stream
    if stream and request.path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", request.path, json=body) as response:
        if response.status_code != 200:
            _refuse(response.status_code, json.loads(await response.aread()))
        if not stream:
            return answer_of(request.path, [json.loads(await response.aread())], whole=True)
        return answer_of(request.path, [event async for event in _events(response)], whole=False)


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    async for line in _lines(response):
        text = line.removeprefix(b"data: ")
        if not text or text == b"[DONE]" or line.startswith((b":", b"event:")):
            continue
        event = json.loads(text)
        if event.get("error"):
            _refuse(200, event)
        if event.get("type") == "error":
            _refuse(200, {"error": event})
        yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    r"""Lines ended by \n; ``aiter_lines`` also splits at other characters in texts."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _refuse(status: int, body: Json) -> None:
    error = body["error"]
    if isinstance(error, str):
        raise Refused(status, "", error)
    raise Refused(status, error.get("code") or "", error.get("message") or "")


def answer_of(path: str, events: list[Json], *, whole: bool) -> Json:
    """Normalise the events of a stream, or the single ``whole`` answer."""
    if path.startswith("/api/"):
        return _ollama(events)
    if path == "/v1/responses":
        return _response(events, whole=whole)
    if path in ("/v1/embeddings", "/tokenize"):
        return without_volatile(events[0])
    choices: dict[int, _Choice] = {}
    shared: dict[str, Json] = {}
    for event in events:
        for part in event["choices"]:
            choices.setdefault(part["index"], _Choice()).add(part)
        if usage := event.get("usage"):
            shared["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if event.get(name) is not None:
                shared[name] = event[name]
    return shared | {"choices": {str(index): choices[index].written() for index in sorted(choices)}}


def _response(events: list[Json], *, whole: bool) -> Json:
    last = events[-1] if whole else events[-1]["response"]
    answer = {name: last.get(name) for name in ("status", "incomplete_details", "output")}
    usage = last["usage"]
    texts = [part["text"] for item in last["output"] for part in item.get("content") or () if "text" in part]
    streamed = [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
    answer["text"] = "".join(texts if whole else streamed)
    return without_volatile(answer | {"usage": [usage["input_tokens"], usage["output_tokens"]]})


def _ollama(events: list[Json]) -> Json:
    if events and "embeddings" in events[0]:
        return {"embeddings": events[0]["embeddings"]}
    text = thinking = ""
    calls: list[Json] = []
    for event in events:
        said = event.get("message") or event
        text += said.get("content") or said.get("response") or ""
        thinking += said.get("thinking") or ""
        calls += [call["function"] for call in said.get("tool_calls") or ()]
    last = events[-1] if events else {}
    ends = {name: last.get(name) for name in ("done", "done_reason", "prompt_eval_count", "eval_count")}
    return without_volatile({"text": text, "thinking": thinking, "calls": calls} | ends)


def without_volatile(value: Json) -> Json:
    """``value`` without volatile keys."""
    if isinstance(value, dict):
        return {name: without_volatile(inner) for name, inner in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [without_volatile(inner) for inner in value]
    return value


def first_difference(answer: Json, right: Json, path: str = "") -> str:
    """Description of the first difference; empty if the answers are equal."""
    if type(answer) is type(right) and isinstance(answer, dict):
        names = [*right, *(name for name in answer if name not in right)]
        found = (first_difference(answer.get(name), right.get(name), f"{path}.{name}") for name in names)
        return next(filter(None, found), "")
    if type(answer) is type(right) and isinstance(answer, list) and len(answer) == len(right):
        found = (first_difference(answer[at], right[at], f"{path}[{at}]") for at in range(len(right)))
        return next(filter(None, found), "")
    return "" if answer == right else f"{path}: {str(answer)[:80]!r} for {str(right)[:80]!r}"
