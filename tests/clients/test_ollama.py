"""Ollama's client, on the routes that Shoal translates."""

from datetime import UTC, datetime, timedelta

import ollama
import pytest
from shapes import Fish

MESSAGES = [{"role": "user", "content": "Name three fish."}]


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(host=server.url)


def test_models(client, server):
    assert {model.model for model in client.list().models} == {f"{server.model}:latest"}
    assert client.show(server.model).modelinfo is not None


def test_sizes(client, server):
    (listed,) = client.list().models
    assert (listed.details.family, listed.details.parameter_size) == ("llama", "134.52M")
    assert listed.size > 10**8
    shown = client.show(server.model)
    assert shown.details.quantization_level == "Q4_1"
    assert shown.modelinfo["llama.context_length"] == 8192


def test_keep_alive(client, server):
    def running():
        return [model.model for model in client.ps().models]

    assert client.generate(model=server.model, keep_alive=0).done_reason == "unload"
    assert running() == []
    assert client.generate(model=server.model, keep_alive="10m").done_reason == "load"
    assert running() == [f"{server.model}:latest"]
    left = client.ps().models[0].expires_at - datetime.now(UTC)
    assert timedelta(0) < left <= timedelta(minutes=10)
    client.chat(model=server.model, messages=MESSAGES, options={"num_predict": 2}, keep_alive=-1)
    assert client.ps().models[0].expires_at - datetime.now(UTC) > timedelta(days=10_000)


def test_pull_and_delete(client):
    assert list(client.pull("gemma3-270m", stream=True))[-1].status == "success"
    assert client.generate("gemma3-270m", "Eels live in", options={"num_predict": 4}).response
    assert client.delete("gemma3-270m").status == "success"
    with pytest.raises(ollama.ResponseError):
        client.generate("gemma3-270m", "Eels live in")


@pytest.mark.parametrize("think", [False, True, "low"])
def test_think(client, server, think):
    answer = client.chat(model=server.model, messages=MESSAGES, think=think, options={"num_predict": 8})
    assert answer.message.content
    assert answer.message.thinking is None


def test_results_of_tools(client, server):
    calls = [{"function": {"name": name, "arguments": {"city": "Bern"}}} for name in ("wind", "rain")]
    results = [
        {"role": "tool", "content": "much", "tool_name": "rain"},
        {"role": "tool", "content": "none", "tool_name": "wind"},
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [
        client.chat(
            model=server.model,
            messages=[*MESSAGES, asked, *ordered],
            options={"num_predict": 16, "temperature": 0},
        ).message.content
        for ordered in (results, results[::-1])
    ]
    assert answers[0] == answers[1]


def test_chat_and_stream(client, server):
    options = {"num_predict": 12, "temperature": 0}
    whole = client.chat(model=server.model, messages=MESSAGES, options=options)
    assert whole.done
    assert 0 < whole.eval_count <= 12
    *pieces, last = client.chat(model=server.model, messages=MESSAGES, options=options, stream=True)
    assert last.done
    assert "".join(piece.message.content for piece in [*pieces, last]) == whole.message.content


def test_generate_and_stream(client, server):
    options = {"num_predict": 12, "temperature": 0}
    whole = client.generate(model=server.model, prompt="Eels live in", options=options)
    pieces = client.generate(model=server.model, prompt="Eels live in", options=options, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.response


def test_structured_output(client, server):
    answer = client.chat(
        model=server.model,
        messages=[{"role": "user", "content": "Describe a fish as JSON."}],
        format=Fish.model_json_schema(),
        options={"num_predict": 200},
    )
    Fish.model_validate_json(answer.message.content)


def test_tools_are_taken(client, server):
    def get_weather(city: str) -> str:
        """Look up the weather in a city.

        Args:
          city: name of the city
        """
        return city

    answer = client.chat(
        model=server.model, messages=MESSAGES, tools=[get_weather], options={"num_predict": 16}
    )
    assert answer.message.content or answer.message.tool_calls


def test_unknown_model(client):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="no-such-model", messages=MESSAGES)
    assert caught.value.status_code == 404
