"""Ollama's client, on the routes that Shoal translates."""

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
