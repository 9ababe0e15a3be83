"""LangChain's ChatOpenAI: structured output in its three methods, tools, streams, embeddings."""

import asyncio

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from shapes import QUESTION, TOOL_NAMES, Fish, get_time, get_weather

DESCRIBE = 'Describe one fish as a JSON object such as {"kind": "eel", "weight_kg": 2, "edible": true}.'


@pytest.fixture
def chat(server):
    return ChatOpenAI(
        model=server.model, base_url=server.v1, api_key="none", temperature=0, max_tokens=200, max_retries=0
    )


def test_invoke_and_stream(chat):
    short = chat.bind(max_tokens=12)
    whole = short.invoke("Name three fish.")
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(piece.content for piece in short.stream("Name three fish.")) == whole.content


def test_batch(chat):
    answers = asyncio.run(chat.bind(max_tokens=8).abatch(["Name a fish.", "Name a bird."]))
    assert all(answer.content for answer in answers)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    assert isinstance(chat.with_structured_output(Fish, method=method).invoke(DESCRIBE), Fish)


def test_structured_output_in_json_mode(chat):
    # This method promises JSON, and nothing about its fields.
    answer = chat.with_structured_output(Fish, method="json_mode", include_raw=True).invoke(DESCRIBE)
    raw = answer["raw"]
    assert raw.content.lstrip().startswith("{")
    if raw.response_metadata["finish_reason"] == "stop" and answer["parsing_error"]:
        assert "valid JSON" not in str(answer["parsing_error"]).partition("Got:")[0]


def test_bound_tools(chat):
    bound = chat.bind_tools([get_weather, get_time], tool_choice="any")
    call = bound.invoke(QUESTION)
    assert call.tool_calls
    assert not call.invalid_tool_calls
    assert {made["name"] for made in call.tool_calls} <= TOOL_NAMES
    results = [ToolMessage("rain", tool_call_id=made["id"]) for made in call.tool_calls]
    after = chat.bind_tools([get_weather, get_time], tool_choice="none").bind(max_tokens=16)
    assert after.invoke([HumanMessage(QUESTION), call, *results]).content


def test_a_streamed_tool_call(chat):
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    first, *more = bound.stream(QUESTION)
    for chunk in more:
        first += chunk
    (call,) = first.tool_calls
    get_weather.model_validate(call["args"])


def test_responses_api(server):
    chat = ChatOpenAI(
        model=server.model,
        base_url=server.v1,
        api_key="none",
        use_responses_api=True,
        temperature=0,
        max_tokens=200,
    )
    assert chat.bind(max_tokens=16).invoke("Name three fish.").text
    assert isinstance(chat.with_structured_output(Fish).invoke(DESCRIBE), Fish)


def test_completion(server):
    model = OpenAI(model=server.model, base_url=server.v1, api_key="none", max_tokens=8)
    assert model.invoke("Eels live in")


def test_embeddings(server):
    # Without this it sends OpenAI's token ids, cut with OpenAI's tokenizer.
    model = OpenAIEmbeddings(
        model=server.model, base_url=server.v1, api_key="none", check_embedding_ctx_length=False
    )
    assert len(model.embed_documents(["eel", "trout in a river"])) == 2
