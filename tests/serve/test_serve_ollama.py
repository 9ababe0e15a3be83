"""Ollama's API in front of the same engine."""

import asyncio
import json

import ollama
import pytest
from serve_builders import FakeEngine, make_app, make_client, serving_in_thread

from shoal.config.api_keys import ApiKey
from shoal.serve.http.request_context import RequestContext
from shoal.serve.ollama.formats import OllamaFormat, OllamaWriter
from shoal.serve.ollama.request_bodies import OllamaChatBody, OllamaGenerateBody
from shoal.serve.openai.response_bodies import PromptTokensDetails, Usage, encode

GREEDY = {"temperature": 0}


def ask(method, path, body=None, engine=None, headers=None, **options):
    async def main():
        async with make_client(make_app(engine, **options)) as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(main())


def chat(**fields):
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "chat", "messages": messages, "options": GREEDY, "stream": False} | fields


def generate(**fields):
    return {"model": "base", "prompt": "hello world", "options": GREEDY, "stream": False} | fields


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def check_end(answer, prompt, output, reason="stop"):
    assert (answer["done"], answer["done_reason"]) == (True, reason)
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (prompt, output)
    assert answer["prompt_eval_duration"] > 0
    assert answer["eval_duration"] >= 0
    assert answer["prompt_eval_duration"] + answer["eval_duration"] <= answer["total_duration"]
    assert isinstance(answer["total_duration"], int)


@pytest.mark.parametrize("model", ["chat", "chat:latest"])
def test_a_chat(model):
    answer = ask("POST", "/api/chat", chat(model=model)).json()
    assert answer["model"] == "chat"
    assert answer["message"] == {"role": "assistant", "content": "<user>hi"}
    check_end(answer, prompt=8, output=9)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_the_load_duration(stream):
    for path, body in (
        ("chat", chat()),
        ("generate", generate()),
        ("embed", {"model": "base", "input": "a"}),
    ):
        for load_ns in (0, 7):
            answer = ask("POST", f"/api/{path}", body | {"stream": stream}, FakeEngine(load_ns=load_ns))
            last = json.loads(answer.text.splitlines()[-1])
            assert last["load_duration"] == load_ns, path


def embed(**fields):
    return ask("POST", "/api/embed", {"model": "base"} | fields)


def test_texts_are_embedded():
    answer = embed(input=["ab", "c"], options={"num_ctx": 4096}, keep_alive="5m").json()
    assert answer["embeddings"] == [[0.0, 0.5, 3.0], [0.0, 0.5, 2.0]]
    assert (answer["model"], answer["prompt_eval_count"], answer["load_duration"]) == ("base", 5, 0)
    assert answer["total_duration"] > 0
    assert embed(model="base:latest", input="ab").json()["embeddings"] == [[0.0, 0.5, 3.0]]
    assert embed().json() == {"model": "base", "embeddings": []}
    assert embed(input="a" * 900).json()["embeddings"] == [[0.0, 0.5, 199.0]]
    long = embed(input="a" * 900, truncate=False)
    assert (long.status_code, "input" in long.json()["error"]) == (400, True)
    assert embed(model="none", input="ab").status_code == 404


def test_the_older_embedding_endpoint():
    def answer(**fields):
        return ask("POST", "/api/embeddings", {"model": "base"} | fields)

    assert answer(prompt="ab", options={"num_ctx": 4096}).json() == {"embedding": [0.0, 0.5, 3.0]}
    assert answer(prompt="a" * 900).json() == {"embedding": [0.0, 0.5, 199.0]}
    assert answer().json() == {"embedding": []}
    assert answer(model="none", prompt="ab").status_code == 404


def test_a_stream_is_the_default():
    body = chat(options=GREEDY | {"num_predict": 5})
    del body["stream"]
    *pieces, last = lines(ask("POST", "/api/chat", body))
    assert "".join(piece["message"]["content"] for piece in pieces) == "<user"
    assert not any(piece["done"] for piece in pieces)
    assert last["message"]["content"] == ""
    check_end(last, prompt=8, output=5, reason="length")


def test_generate_uses_the_chat_template_where_there_is_one():
    body = generate(model="chat", prompt="hi", system="be")
    answer = ask("POST", "/api/generate", body).json()
    assert answer["response"] == "<system>be<user>hi"
    assert ask("POST", "/api/generate", body | {"raw": True, "system": None}).json()["response"] == "hi"


def test_generate_continues_text_until_it_ends():
    answer = ask("POST", "/api/generate", generate(prompt="a text of more than sixteen tokens")).json()
    assert answer["response"] == "a text of more than sixteen tokens"
    check_end(answer, prompt=35, output=35)
    *pieces, last = lines(ask("POST", "/api/generate", generate(stream=True)))
    assert "".join(piece["response"] for piece in pieces) == "hello world"
    check_end(last, prompt=12, output=12)


def test_options_reach_the_engine():
    engine = FakeEngine()
    options = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "seed": 11,
        "num_predict": 4,
        "num_ctx": 4096,
    }
    assert ask("POST", "/api/chat", chat(options=options), engine).status_code == 200
    (request,) = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, 0.75)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.5, 11, 4)


def test_integers_may_be_whole_floats():
    engine = FakeEngine()
    options = {"top_k": 7.0, "seed": 11.0, "num_predict": 4.0, "num_ctx": 4096.0, "repeat_last_n": 64.0}
    assert ask("POST", "/api/chat", chat(options=options), engine).status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 11, 4)


NEUTRAL = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1, "typical_p": 1.0}


@pytest.mark.parametrize("path", ["chat", "generate", "embed"])
def test_options_that_are_off_are_accepted(path):
    body = {"chat": chat(), "generate": generate(), "embed": {"model": "base", "input": "ab"}}[path]
    options = GREEDY | NEUTRAL | {"penalize_newline": True, "f16_kv": True, "num_gpu": 0}
    assert ask("POST", f"/api/{path}", body | {"options": options}).status_code == 200
    for name, value in (("mirostat", 1), ("tfs_z", 0.5), ("typical_p", 0.5), ("penalize_newline", False)):
        refused = ask("POST", f"/api/{path}", body | {"options": {name: value}})
        assert refused.status_code == 400
        assert refused.json()["error"].startswith(f"options.{name} is not supported by this server; ")


def test_stop_strings_end_the_answer():
    for stop in ("hi", ["x", "hi"]):
        answer = ask("POST", "/api/chat", chat(options=GREEDY | {"stop": stop})).json()
        assert answer["message"]["content"] == "<user>"


@pytest.mark.parametrize("num_predict", [-1, -2])
def test_a_number_below_0_is_no_limit(num_predict):
    engine = FakeEngine()
    ask("POST", "/api/generate", generate(options={"num_predict": num_predict}), engine)
    assert engine.submitted[0].sampling.max_tokens is None


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", chat(model="gpt"), 404, "chat, base"),
        ("chat", chat(model="base"), 400, "chat_template"),
        ("chat", chat(options={"top_p": 7}), 400, "top_p"),
        ("chat", chat(options={"mirostat": 2}), 400, "options.mirostat"),
        ("chat", chat(options={"num_predict": "5"}), 400, "options.num_predict"),
        ("chat", chat(messages=[{"role": "user", "content": "a", "images": ["aGk="]}]), 400, "images"),
        ("chat", chat(messages=[{"role": "robot", "content": "a"}]), 400, "role"),
        ("chat", chat(options={"top_k": 7.5}), 400, "options.top_k"),
        ("chat", chat(think="hard"), 400, 'think must be true, false, "low", "medium" or "high"'),
        ("chat", chat(format="yaml"), 400, 'format must be "json" or a JSON schema'),
        ("generate", generate(keep_alive=True), 400, "keep_alive must be a number of seconds or"),
        ("embed", {"model": "base", "input": "a", "keep_alive": ""}, 400, "keep_alive must be a number of"),
        ("chat", chat(mesages=[]), 400, "did you mean 'messages'"),
        ("generate", generate(system="be"), 400, "system"),
        ("generate", generate(suffix="b"), 400, "suffix"),
        ("generate", generate(context=[1]), 400, "context"),
        ("generate", generate(logprobs=True), 400, "logprobs is not supported by this server; /v1/chat"),
        ("chat", chat(top_logprobs=2), 400, "top_logprobs is not supported by this server; /v1/chat"),
        ("embed", {"model": "base", "input": "a", "dimensions": 5}, 400, "dimensions is not supported"),
        ("show", {"model": "gpt"}, 404, "chat, base"),
        ("create", {"model": "gpt"}, 404, "models are not made here; POST /admin/services"),
        ("copy", {"source": "chat", "destination": "b"}, 404, "POST /admin/services"),
        ("push", {"model": "chat"}, 404, "not published"),
        ("blobs/sha256:00", {}, 404, "not uploaded"),
    ],
)
def test_errors_are_plain_text_in_an_object(path, body, status, words):
    response = ask("POST", f"/api/{path}", body)
    assert response.status_code == status
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]
    assert response.headers["content-length"] == str(len(response.content))


def test_an_error_in_mid_stream_is_the_last_line():
    *_, last = lines(ask("POST", "/api/generate", generate(stream=True), FakeEngine(fail_after=3)))
    assert "engine process ended" in last["error"]


def test_empty_requests_succeed():
    assert ask("POST", "/api/generate", generate(prompt="")).json()["done_reason"] == "load"
    assert ask("POST", "/api/chat", chat(messages=[])).json()["done_reason"] == "load"
    # For clients written in Go null is an empty list or text.
    assert ask("POST", "/api/generate", generate(prompt=None)).json()["done_reason"] == "load"
    assert ask("POST", "/api/chat", chat(messages=None, tools=None)).json()["done_reason"] == "load"
    assert ask("POST", "/api/embed", {"model": "base", "input": None}).json()["embeddings"] == []


@pytest.mark.parametrize("value", [True, False, None])
def test_long_prompts_are_refused_whatever_the_client_says(value):
    for path, body in (("chat", chat()), ("generate", generate())):
        assert ask("POST", f"/api/{path}", body | {"truncate": value, "shift": value}).status_code == 200


def test_api_keys_apply_here_too():
    key = ApiKey(key="k", services=("chat",))
    headers = {"Authorization": "Bearer k"}
    assert ask("POST", "/api/chat", chat(), api_keys=(key,)).status_code == 401
    assert ask("POST", "/api/chat", chat(), api_keys=(key,), headers=headers).status_code == 200
    assert ask("POST", "/api/generate", generate(), api_keys=(key,), headers=headers).status_code == 403
    assert len(ask("GET", "/api/tags", api_keys=(key,), headers=headers).json()["models"]) == 1


def test_tools_and_formats_become_openai_s():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "object"}
    fields = OllamaChatBody(model="m", messages=[], tools=[tool], format=schema).as_chat()
    assert fields["tools"] == [tool]
    assert fields["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "format", "schema": schema},
    }
    fields = OllamaGenerateBody(model="m", format="json").as_chat()
    assert fields["response_format"] == {"type": "json_object"}


def test_the_clients_of_ollama():
    with serving_in_thread(FakeEngine()) as url:
        client = ollama.Client(host=url)
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat(model="chat", messages=messages, options=GREEDY)
        assert answer.message.content == "<user>hi"
        pieces = client.chat(model="chat", messages=messages, options=GREEDY, stream=True)
        assert "".join(piece.message.content for piece in pieces) == "<user>hi"
        assert client.generate(model="base", prompt="abc", options=GREEDY).response == "abc"
        assert [model.model for model in client.list().models] == ["chat:latest", "base:latest"]
        assert client.show("chat").capabilities == ["completion", "tools"]
        assert client.ps().models
        assert client.embed(model="base", input=["ab", "c"]).embeddings == [[0.0, 0.5, 3.0], [0.0, 0.5, 2.0]]
        assert client.embeddings(model="base", prompt="ab").embedding == [0.0, 0.5, 3.0]
        with pytest.raises(ollama.ResponseError, match="available: chat, base") as missing:
            client.chat(model="gpt", messages=messages)
        assert missing.value.status_code == 404


class Scripted:
    """A format of OpenAI's that writes these chunks, or this message."""

    def __init__(self, *choices):
        self.choices = choices

    def chunks(self, index, delta, usage):
        return [encode({"choices": [choice]}) for choice in self.choices]

    def full(self, outputs, usage):
        return encode({"choices": self.choices})


USAGE = Usage(5, 3, 8, PromptTokensDetails(0))


def translate(format, place=lambda message: {"message": message}):
    return OllamaFormat(format, OllamaWriter("m", RequestContext("id", 0), place))


def piece(finish=None, **delta):
    return {"delta": delta, "finish_reason": finish}


def call(arguments, **more):
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments} | more}]}


def test_complete_calls_come_before_the_end_of_a_stream():
    format = translate(
        Scripted(
            piece(role="assistant", content=""),
            piece(reasoning_content="so"),
            piece(content="Look: "),
            piece(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]),
            piece(**call('{"x"')),
            piece(**call(": 1}")),
            piece(tool_calls=[{"index": 1, "id": "b", "function": {"name": "g", "arguments": ""}}]),
            piece("tool_calls"),
        )
    )
    told = [json.loads(line) for line in format.chunks(0, None, USAGE)]
    calls = [
        {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}},
        {"id": "b", "function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    assert [line["message"] for line in told] == [
        {"role": "assistant", "content": "", "thinking": "so"},
        {"role": "assistant", "content": "Look: "},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    assert not any(line["done"] for line in told)
    last = json.loads(format.usage_chunk(USAGE))
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 3)


@pytest.mark.parametrize(("arguments", "read"), [('{"x": 1}', {"x": 1}), ("", {}), ('{"x": ', {})])
def test_calls_of_a_full_response(arguments, read):
    message = {
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}],
    }
    format = translate(Scripted({"message": message, "finish_reason": "tool_calls"}))
    answer = json.loads(format.full([], USAGE))["message"]
    assert answer["content"] == ""
    assert answer["tool_calls"] == [{"id": "c", "function": {"index": 0, "name": "f", "arguments": read}}]
