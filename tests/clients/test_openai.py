"""OpenAI's own client: chats, tools, structured output, responses, embeddings."""

import asyncio
import json
import math

import openai
import pytest
from shapes import QUESTION, TOOL_NAMES, TOOLS, Fish, get_weather, tool

MESSAGES = [{"role": "user", "content": "Name three fish."}]
ASK_FOR_WEATHER = [{"role": "user", "content": QUESTION}]
FISH = [{"role": "user", "content": "Describe one fish as JSON with kind, weight_kg and edible."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12


def test_stream_joins_to_the_whole(client, server):
    ask = {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    *chunks, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_async_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
            asks = [
                client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=8)
                for _ in range(4)
            ]
            return await asyncio.gather(*asks)

    assert all(answer.choices[0].message.content for answer in asyncio.run(main()))


def test_a_tool_is_called_and_its_result_read(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=ASK_FOR_WEATHER,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name in TOOL_NAMES
        get_weather.model_validate_json(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    after = client.chat.completions.create(
        model=server.model,
        messages=[*ASK_FOR_WEATHER, message, *results],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=16,
    )
    assert after.choices[0].message.content
    assert not after.choices[0].message.tool_calls


def test_a_named_tool_is_called(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=ASK_FOR_WEATHER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        max_tokens=100,
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_time"]


def test_auto_calls_a_tool_or_answers(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=ASK_FOR_WEATHER, tools=TOOLS, max_tokens=60, temperature=0
    )
    message = answer.choices[0].message
    assert message.content or {call.function.name for call in message.tool_calls} <= TOOL_NAMES


def test_streamed_arguments_join_to_the_whole(client, server):
    ask = {
        "model": server.model,
        "messages": ASK_FOR_WEATHER,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
    with client.chat.completions.stream(**ask) as stream:
        pieces = [event.arguments_delta for event in stream if event.type.endswith("arguments.delta")]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == whole.function.name
    assert call.function.arguments == "".join(pieces) == whole.function.arguments


def test_parse_with_a_pydantic_class(client, server):
    answer = client.chat.completions.parse(
        model=server.model, messages=FISH, response_format=Fish, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Fish)


def test_parse_with_tools(client, server):
    answer = client.chat.completions.parse(
        model=server.model,
        messages=ASK_FOR_WEATHER,
        tools=[openai.pydantic_function_tool(get_weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, get_weather)


def test_a_parsed_stream(client, server):
    with client.chat.completions.stream(
        model=server.model, messages=FISH, response_format=Fish, max_tokens=200
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert Fish.model_validate_json(text) == parsed


def test_json_object(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": 'Answer with the JSON {"a": 1} and nothing else.'}],
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_response(client, server):
    answer = client.responses.create(
        model=server.model,
        instructions="Be short.",
        input="Name three fish.",
        max_output_tokens=16,
        temperature=0,
    )
    assert answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_response_stream_joins_to_the_whole(client, server):
    ask = {"model": server.model, "input": "Name three fish.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    kinds = [event.type for event in client.responses.create(**ask, stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_response_with_tools(client, server):
    described = tool(get_weather)["function"] | {"type": "function", "strict": True}
    described["parameters"] |= {"additionalProperties": False}
    answer = client.responses.create(
        model=server.model,
        input=QUESTION,
        tools=[described],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    results = []
    for call in calls:
        get_weather.model_validate_json(call.arguments)
        results.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    after = client.responses.create(
        model=server.model,
        input=[{"role": "user", "content": QUESTION}, *answer.output, *results],
        tools=[described],
        tool_choice="none",
        max_output_tokens=16,
    )
    assert after.output_text


def test_parsed_response(client, server):
    answer = client.responses.parse(
        model=server.model, input=FISH[0]["content"], text_format=Fish, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Fish)


def test_embeddings(client, server):
    texts = ["a fish in the river", "a fish in a river", "stock exchange"]
    answer = client.embeddings.create(model=server.model, input=texts)
    first, near, far = (item.embedding for item in answer.data)
    assert math.hypot(*first) == pytest.approx(1, abs=1e-3)
    assert math.dist(first, near) < math.dist(first, far)
    plain = client.embeddings.create(model=server.model, input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-2)


def test_echo_with_logprobs(client, server):
    answer = client.completions.create(
        model=server.model, prompt="Eels live in rivers", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("Eels live in rivers")
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == answer.usage.total_tokens


def test_logit_bias(client, server):
    ask = {"model": server.model, "prompt": "Name a fish.", "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(**ask, logprobs=0, logit_bias={"30": 100})
    assert len(set(answer.choices[0].logprobs.tokens)) == 1


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=-1)
