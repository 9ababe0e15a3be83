"""LlamaIndex's OpenAILike."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shapes import CITIES, QUESTION, Fish, get_weather


@pytest.fixture
def llm(server):
    return OpenAILike(
        model=server.model,
        api_base=server.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


def test_chat_and_stream(llm):
    messages = [ChatMessage(role="user", content="Name three fish.")]
    whole = llm.chat(messages, max_tokens=12)
    *_, last = llm.stream_chat(messages, max_tokens=12)
    assert last.message.content == whole.message.content


def test_complete(server):
    llm = OpenAILike(model=server.model, api_base=server.v1, api_key="none", max_tokens=8)
    assert llm.complete("Eels live in").text


def test_tools(llm):
    tool = FunctionTool.from_defaults(
        fn=lambda city: "rain", name="get_weather", description="Weather of a city.", fn_schema=get_weather
    )
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls
    for call in calls:
        assert call.tool_name == "get_weather"
        assert call.tool_kwargs["city"] in CITIES


def test_structured_output_through_a_tool(llm):
    fish = llm.structured_predict(Fish, PromptTemplate("Describe one {what}."), what="fish")
    assert isinstance(fish, Fish)


def test_structured_output_through_a_schema(llm):
    structured = OpenAILike(**(llm.to_dict() | {"api_key": "none", "should_use_structured_outputs": True}))
    fish = structured.structured_predict(Fish, PromptTemplate("Describe one {what}."), what="fish")
    assert isinstance(fish, Fish)
