"""The official client against a real server on a loopback port."""

import openai
import pydantic
import pytest
from serve_builders import FakeEngine, serving_in_thread

from shoal.core import QueueFull

MESSAGES = [{"role": "user", "content": "hi"}]


def connect(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def url():
    with serving_in_thread(FakeEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with connect(url) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["chat", "base"]
    assert client.models.retrieve("base").owned_by == "shoal"


def test_chat(client):
    response = client.chat.completions.create(model="chat", messages=MESSAGES, temperature=0)
    assert response.choices[0].message.content == "<user>hi"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens == 9


def test_chat_continues_with_the_answer_in_its_history(client):
    first = client.chat.completions.create(model="chat", messages=MESSAGES, temperature=0)
    messages = [*MESSAGES, first.choices[0].message.model_dump(), *MESSAGES]
    second = client.chat.completions.create(model="chat", messages=messages, temperature=0)
    assert second.choices[0].message.content == "<user>hi<assistant><user>hi<user>hi"


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["<user>hi"] * 2
    assert last.choices == []
    assert last.usage.completion_tokens == 18


def test_clients_own_stream_helper_accumulates(client):
    with client.chat.completions.stream(model="chat", messages=MESSAGES, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "<user>hi"


def test_completion(client):
    response = client.completions.create(
        model="base", prompt=["hello world", "hi"], temperature=0, stop=["o w"], logprobs=1, max_tokens=20
    )
    assert [choice.text for choice in response.choices] == ["hell", "hi"]
    assert response.choices[0].logprobs.tokens[:4] == list("hell")


def test_completion_stream(client):
    stream = client.completions.create(model="base", prompt="hello", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hello"


def test_chat_logprobs(client):
    response = client.chat.completions.create(
        model="chat", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3
    )
    content = response.choices[0].logprobs.content
    assert content[0].token == "<"
    assert len(content[0].top_logprobs) == 3


def test_seed_and_choices(client):
    def texts():
        response = client.completions.create(model="base", prompt="a", n=3, seed=11, max_tokens=10)
        return [choice.text for choice in response.choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_parameters_of_vllm(client):
    response = client.completions.create(
        model="base",
        prompt=[99, 100],
        temperature=0,
        max_tokens=5,
        extra_body={"ignore_eos": True, "min_tokens": 1, "top_k": 5, "repetition_penalty": 1.0},
    )
    assert response.choices[0].text == "abzzz"


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="base", prompt="a", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="chat_template"):
        client.chat.completions.create(model="base", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="base", prompt="a" * 500)
    assert long.value.code == "context_length_exceeded"


def test_goals_are_an_extra_field(client):
    response = client.completions.create(model="base", prompt="a", extra_body={"slo": {"ttft": 0.5}})
    assert response.choices
    with pytest.raises(openai.BadRequestError, match=r"slo\.ttft"):
        client.completions.create(model="base", prompt="a", extra_body={"slo": {"ttft": 0}})


def test_full_queue_is_a_rate_limit_error():
    class FullEngine(FakeEngine):
        async def submit(self, *arguments):
            raise QueueFull("8 requests wait already", retry_after_s=2)

    with serving_in_thread(FullEngine()) as url, connect(url) as client:
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="base", prompt="a")
        assert full.value.response.headers["retry-after"] == "2"


def test_engine_death_in_mid_stream_is_an_api_error():
    with serving_in_thread(FakeEngine(fail_after=2)) as url, connect(url) as client:
        stream = client.completions.create(model="base", prompt="hello", temperature=0, stream=True)
        with pytest.raises(openai.APIError, match="engine process ended"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="base", prompt="hello")


WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: str


@pytest.fixture(scope="module")
def calling():
    with (
        serving_in_thread(FakeEngine(context=4000, says=f"Let me see.\n{CALL}")) as url,
        connect(url) as client,
    ):
        yield client


def test_tools(calling):
    tools = [{"type": "function", "function": WEATHER}]
    first = calling.chat.completions.create(model="chat", messages=MESSAGES, temperature=0, tools=tools)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert first.choices[0].finish_reason == "tool_calls"
    messages = [
        *MESSAGES,
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain"},
    ]
    second = calling.chat.completions.create(model="chat", messages=messages, temperature=0, tools=tools)
    assert second.choices[0].message.content == "Let me see."


def test_tools_with_the_clients_own_helpers(calling):
    tools = [openai.pydantic_function_tool(Weather)]
    parsed = calling.chat.completions.parse(model="chat", messages=MESSAGES, temperature=0, tools=tools)
    message = parsed.choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    with calling.chat.completions.stream(
        model="chat", messages=MESSAGES, temperature=0, tools=[{"type": "function", "function": WEATHER}]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert final.content == "Let me see."
    sent_back = [*MESSAGES, final.model_dump(), *MESSAGES]
    assert calling.chat.completions.create(model="chat", messages=sent_back, temperature=0).choices


def test_responses(calling):
    tools = [{"type": "function", **WEATHER}]
    first = calling.responses.create(model="chat", input="Weather?", temperature=0, tools=tools)
    assert first.output_text == "Let me see."
    call = first.output[1]
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Oslo"}')
    history = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
    ]
    assert calling.responses.create(model="chat", input=history, temperature=0).output
    with pytest.raises(openai.NotFoundError, match="not stored"):
        calling.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="whole history"):
        calling.responses.create(model="chat", input="a", previous_response_id=first.id)


def test_responses_stream(calling):
    tools = [{"type": "function", **WEATHER}]
    stream = calling.responses.create(model="chat", input="a", temperature=0, tools=tools, stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Let me see."
    with calling.responses.stream(model="chat", input="a", temperature=0, tools=tools) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[1].arguments == '{"city": "Oslo"}'


def test_responses_parse():
    with serving_in_thread(FakeEngine(context=4000, says='{"city": "Oslo"}')) as url, connect(url) as client:
        parsed = client.responses.parse(model="chat", input="a", temperature=0, text_format=Weather)
        assert parsed.output_parsed == Weather(city="Oslo")
        sent_back = [item.model_dump() for item in parsed.output]
        assert client.responses.create(model="chat", input=sent_back, temperature=0).output


def test_embeddings(client):
    for format in (None, "float", "base64"):
        options = {} if format is None else {"encoding_format": format}
        response = client.embeddings.create(model="base", input=["ab", "c"], **options)
        if format != "base64":
            assert [entry.embedding for entry in response.data] == [[0.0, 0.5, 3.0], [0.0, 0.5, 2.0]]
    assert response.usage.total_tokens == 5
