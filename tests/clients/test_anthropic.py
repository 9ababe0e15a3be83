"""Anthropic's own client: messages, streams, tools, structured output, token counts, errors."""

import asyncio

import anthropic
import pytest
from shapes import QUESTION, TOOLS

MESSAGES = [{"role": "user", "content": "Name three fish."}]
GREEDY = {"temperature": 0}
CLIENT_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_message(client, server):
    answer = client.messages.create(model=server.model, max_tokens=12, messages=MESSAGES, system="Be short.")
    assert answer.content[0].text
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert 0 < answer.usage.output_tokens <= 12


def test_stream_joins_to_the_whole(client, server):
    ask = {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_async_client(server):
    async def main():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            asks = [
                client.messages.create(model=server.model, max_tokens=8, messages=MESSAGES) for _ in range(4)
            ]
            return await asyncio.gather(*asks)

    assert all(answer.content[0].text for answer in asyncio.run(main()))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_read(client, server, streamed):
    ask = {
        "model": server.model,
        "max_tokens": 200,
        "extra_body": GREEDY,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": CLIENT_TOOLS,
    }
    forced = ask | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    if streamed:
        with client.messages.stream(**forced) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**forced)
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert call.input["city"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain, 4 degrees"}
    history = [
        *ask["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**ask | {"messages": history, "max_tokens": 20})
    assert second.usage.output_tokens > 0


def test_tokens_are_counted(client, server):
    count = client.messages.count_tokens(model=server.model, messages=MESSAGES, system="Be short.")
    answer = client.messages.create(model=server.model, max_tokens=1, messages=MESSAGES, system="Be short.")
    cached = answer.usage.cache_read_input_tokens
    assert count.input_tokens == answer.usage.input_tokens + cached


def test_errors_are_the_clients(client):
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="other", max_tokens=5, messages=MESSAGES)
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="images and documents"):
        client.messages.create(model="smollm2", max_tokens=5, messages=[{"role": "user", "content": [image]}])
