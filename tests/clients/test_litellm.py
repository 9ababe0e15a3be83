"""LiteLLM with its provider for OpenAI's API elsewhere, and with those for Ollama's."""

import asyncio

import litellm
import pytest
from shapes import QUESTION, TOOL_NAMES, TOOLS, Fish, get_weather

MESSAGES = [{"role": "user", "content": "Name three fish."}]


@pytest.fixture
def ask(server):
    return {"model": f"openai/{server.model}", "api_base": server.v1, "api_key": "none", "temperature": 0}


def test_completion_and_stream(ask):
    whole = litellm.completion(**ask, messages=MESSAGES, max_tokens=12)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = litellm.completion(**ask, messages=MESSAGES, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


def test_async_completion(ask):
    answer = asyncio.run(litellm.acompletion(**ask, messages=MESSAGES, max_tokens=8))
    assert answer.choices[0].message.content


def test_tools(ask):
    answer = litellm.completion(
        **ask,
        messages=[{"role": "user", "content": QUESTION}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
    )
    message = answer.choices[0].message
    assert {call.function.name for call in message.tool_calls} <= TOOL_NAMES
    for call in message.tool_calls:
        get_weather.model_validate_json(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    history = [{"role": "user", "content": QUESTION}, message, *results]
    after = litellm.completion(**ask, messages=history, tools=TOOLS, tool_choice="none", max_tokens=16)
    assert after.choices[0].message.content


def test_streamed_tool_call(ask):
    question = [{"role": "user", "content": QUESTION}]
    stream = litellm.completion(
        **ask, messages=question, tools=TOOLS, tool_choice="required", max_tokens=200, stream=True
    )
    built = litellm.stream_chunk_builder(list(stream), messages=question)
    for call in built.choices[0].message.tool_calls:
        get_weather.model_validate_json(call.function.arguments)


def test_structured_output(ask):
    answer = litellm.completion(
        **ask,
        messages=[{"role": "user", "content": "Describe a fish as JSON."}],
        response_format=Fish,
        max_tokens=200,
    )
    Fish.model_validate_json(answer.choices[0].message.content)


def test_embedding(ask, server):
    answer = litellm.embedding(
        model=ask["model"], api_base=server.v1, api_key="none", input=["eel", "trout in a river"]
    )
    assert len(answer.data) == 2


def test_responses(ask, server):
    answer = litellm.responses(
        model=ask["model"], api_base=server.v1, api_key="none", input="Name three fish.", max_output_tokens=16
    )
    assert answer.output[0].content[0].text


def test_text_completion(ask):
    answer = litellm.text_completion(
        model=ask["model"].replace("openai/", "text-completion-openai/"),
        api_base=ask["api_base"],
        api_key="none",
        prompt="Eels live in",
        max_tokens=8,
    )
    assert answer.choices[0].text


@pytest.fixture(params=["ollama", "ollama_chat"])
def ask_ollama(server, request):
    return {"model": f"{request.param}/{server.model}", "api_base": server.url, "temperature": 0}


def test_ollama_completion_and_stream(ask_ollama):
    whole = litellm.completion(**ask_ollama, messages=MESSAGES, max_tokens=12)
    assert whole.choices[0].message.content
    stream = litellm.completion(**ask_ollama, messages=MESSAGES, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


def test_ollama_tools(ask_ollama):
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
        for id in ("a", "b")
    ]
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "wind"},
    ]
    for messages in (history[:1], history):
        answer = litellm.completion(**ask_ollama, messages=messages, tools=TOOLS, max_tokens=16)
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_ollama_structured_output(ask_ollama):
    answer = litellm.completion(
        **ask_ollama,
        messages=[{"role": "user", "content": "Describe a fish as JSON."}],
        response_format=Fish,
        max_tokens=200,
    )
    Fish.model_validate_json(answer.choices[0].message.content)


def test_ollama_embedding(server):
    answer = litellm.embedding(
        model=f"ollama/{server.model}", api_base=server.url, input=["eel", "trout in a river"]
    )
    assert len(answer.data) == 2
