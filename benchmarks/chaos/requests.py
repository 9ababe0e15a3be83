"""Random valid requests to all routes of a server, each with one right answer (greedy or seeded).

A request's ``model`` is ``chat`` (an instruction model) or ``complete`` (a base model); services with the
same weights give the same answers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

_WORDS = (
    "river", "stone", "light", "market", "winter", "garden", "engine", "letter", "window", "bridge", "copper",
    "music", "story", "harbour",
)  # fmt: skip
_SCHEMAS: list[Body] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"kind": {"const": "fish"}, "tags": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["kind"],
    },
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"type": "null"}]},
]
_REGEXES = ["[a-z]{3,9}", "(yes|no), [A-Z][a-z]+", "[0-9]{4}-[01][0-9]", "[a-z ]{10,40}\\."]
_GRAMMARS = ['start: "yes" | "no" | NUMBER\nNUMBER: /[0-9]{1,6}/', 'root ::= "<" [a-z]+ ">"']


@dataclass(frozen=True)
class Request:
    """streams: whether a streamed answer is possible; it is the same."""

    path: str
    body: Body
    streams: bool


def make_requests(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    makers: list[Callable[[random.Random], Request]] = [
        _chat, _tools, _completion, _chat_grammar, _response, _completion, _ollama_chat, _chat,
        _ollama_generate, _scores, _embeddings, _continued, _completion_grammar, _tokenize,
    ]  # fmt: skip
    return [makers[number % len(makers)](rng) for number in range(count)]


def _words(rng: random.Random, most: int = 60) -> str:
    opening = rng.choice(["", "Tell me a story. ", "Tell me a story. It is about a river. "])
    return opening + " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


def _messages(rng: random.Random) -> list[Body]:
    messages = [{"role": "system", "content": "Answer briefly."}] if rng.random() < 0.4 else []
    for _ in range(rng.choice([0, 0, 1, 2])):
        messages += [
            {"role": "user", "content": _words(rng, 20)},
            {"role": "assistant", "content": _words(rng, 20)},
        ]
    return [*messages, {"role": "user", "content": _words(rng)}]


def _sampling(rng: random.Random) -> Body:
    """Sampling fields that the text routes, Responses and Ollama share."""
    if rng.random() < 0.4:
        return {"temperature": 0}
    fields: Body = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(1 << 30)}
    if rng.random() < 0.4:
        fields["top_p"] = 0.9
    if rng.random() < 0.3:
        fields["top_k"] = rng.choice([5, 40])
    if rng.random() < 0.2:
        fields["min_p"] = 0.05
    return fields


def _common(rng: random.Random, *, grammar: bool = False) -> Body:
    fields: Body = {"max_tokens": rng.randint(4, 48), "return_token_ids": True} | _sampling(rng)
    options: list[tuple[float, str, Any]] = [
        (0.25, "n", rng.randint(2, 3)),
        (0.2, "presence_penalty", 0.5),
        (0.2, "frequency_penalty", 0.4),
        (0.2, "repetition_penalty", 1.2),
    ]
    if not grammar:
        options += [
            (0.3, "stop", rng.sample([" a", ".", "\n", "the", " of", ","], 2)),
            (0.2, "bad_words", ["the", "river", "I"]),
            (0.2, "min_tokens", 4),
            (0.2, "ignore_eos", True),
            (0.15, "logit_bias", {"260": 5, "300": -100}),
            (0.15, "include_stop_str_in_output", True),
            (0.15, "skip_special_tokens", False),
        ]
    return fields | {name: value for chance, name, value in options if rng.random() < chance}


def _model(rng: random.Random) -> Body:
    return {"model": "chat" if rng.random() < 0.7 else "complete"}


def _chat(rng: random.Random) -> Request:
    body = _model(rng) | {"messages": _messages(rng)} | _common(rng)
    if rng.random() < 0.6:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 2, 5])}
    return Request("/v1/chat/completions", body, True)


def _chat_grammar(rng: random.Random) -> Request:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": rng.choice(_SCHEMAS)}}
    constraint: Body = rng.choice(
        [
            {"response_format": schema},
            {"response_format": schema},
            {"response_format": {"type": "json_object"}},
            {"guided_regex": rng.choice(_REGEXES)},
            {"structured_outputs": {"choice": ["river", "stone", "rivers and stones"]}},
            {"guided_grammar": rng.choice(_GRAMMARS)},
        ]
    )
    body = _model(rng) | {"messages": _messages(rng)} | _common(rng, grammar=True) | constraint
    if rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": 1}
    return Request("/v1/chat/completions", body, True)


def _functions() -> list[Body]:
    return [
        {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 2, 3]}},
                "required": ["town"],
            },
        },
        {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    ]


def _tools(rng: random.Random) -> Request:
    body: Body = {"model": "chat", "messages": _messages(rng), "max_tokens": rng.randint(8, 56)}
    body |= _sampling(rng)
    if rng.random() < 0.4:  # an earlier tool call and its result
        call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]
    body["tools"] = [{"type": "function", "function": function} for function in _functions()]
    named = {"type": "function", "function": {"name": rng.choice(["weather", "now"])}}
    body["tool_choice"] = rng.choice(["auto", "required", "none", named, "required"])
    body["parallel_tool_calls"] = rng.random() < 0.5
    return Request("/v1/chat/completions", body | {"return_token_ids": True}, True)


def _continued(rng: random.Random) -> Request:
    messages = [*_messages(rng), {"role": "assistant", "content": rng.choice(["The", "It is <", "end of"])}]
    body = _model(rng) | {"messages": messages} | _common(rng)
    return Request(
        "/v1/chat/completions", body | {"continue_final_message": True, "add_generation_prompt": False}, True
    )


def _prompt(rng: random.Random) -> Any:
    match rng.randrange(4):
        case 0:
            return [_words(rng, 20) for _ in range(rng.randint(1, 3))]
        case 1:
            return [rng.randrange(300, 20000) for _ in range(rng.randint(1, 90))]
        case _:
            return _words(rng)


def _completion(rng: random.Random) -> Request:
    body = _model(rng) | {"prompt": _prompt(rng)} | _common(rng)
    if rng.random() < 0.6:
        body["logprobs"] = rng.choice([0, 1, 4])
    elif rng.random() < 0.3:
        body["echo"] = True
    return Request("/v1/completions", body, True)


def _completion_grammar(rng: random.Random) -> Request:
    constraint: Body = rng.choice(
        [{"guided_json": rng.choice(_SCHEMAS)}, {"guided_regex": rng.choice(_REGEXES)}]
    )
    body = _model(rng) | {"prompt": _words(rng)} | _common(rng, grammar=True) | constraint
    return Request("/v1/completions", body | {"logprobs": 2}, True)


def _scores(rng: random.Random) -> Request:
    """Log-probabilities of the prompt, which cannot be streamed."""
    if rng.random() < 0.5:
        body = _model(rng) | {"messages": _messages(rng)} | _common(rng) | {"prompt_logprobs": 2}
        return Request("/v1/chat/completions", body, False)
    body = _model(rng) | {"prompt": _words(rng)} | _common(rng)
    body |= rng.choice([{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
    return Request("/v1/completions", body, False)


def _response(rng: random.Random) -> Request:
    body: Body = {"model": "chat", "max_output_tokens": rng.randint(8, 48)} | _sampling(rng)
    body["input"] = _words(rng) if rng.random() < 0.5 else _messages(rng)
    match rng.randrange(4):
        case 0:
            body["instructions"] = "Be kind."
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        case 1:
            body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": rng.choice(_SCHEMAS)}}
        case 2:
            body["tools"] = [{"type": "function"} | function for function in _functions()]
            body["tool_choice"] = rng.choice(["auto", "required"])
        case _:
            body["presence_penalty"] = 0.3
    return Request("/v1/responses", body, True)


def _options(rng: random.Random) -> Body:
    options = _sampling(rng) | {"num_predict": rng.randint(4, 40)}
    if rng.random() < 0.3:
        options["stop"] = ["\n", " of"]
    return options


def _ollama_chat(rng: random.Random) -> Request:
    body = _model(rng) | {"messages": _messages(rng), "options": _options(rng)}
    match rng.randrange(4):
        case 0:
            body["format"] = rng.choice(["json", rng.choice(_SCHEMAS)])
        case 1:
            body |= {"model": "chat", "think": False}
            body["tools"] = [{"type": "function", "function": function} for function in _functions()]
    return Request("/api/chat", body, True)


def _ollama_generate(rng: random.Random) -> Request:
    body = _model(rng) | {"prompt": _words(rng), "options": _options(rng), "raw": rng.random() < 0.5}
    return Request("/api/generate", body, True)


def _embeddings(rng: random.Random) -> Request:
    texts = [_words(rng) for _ in range(rng.randint(1, 3))]
    path = rng.choice(["/v1/embeddings", "/api/embed"])
    return Request(path, _model(rng) | {"input": texts}, False)


def _tokenize(rng: random.Random) -> Request:
    fields: Body = rng.choice([{"prompt": _words(rng)}, {"messages": _messages(rng)}])
    return Request("/tokenize", _model(rng) | fields | {"return_token_strs": True}, False)
