"""Pydantic AI: output types in its three modes, tools, streams, both of OpenAI's APIs."""

import asyncio
import contextlib
from typing import Literal

import pytest
from pydantic_ai import (
    Agent,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
    capture_run_messages,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shapes import QUESTION, Fish

SETTINGS = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request, server):
    return request.param(server.model, provider=OpenAIProvider(base_url=server.v1, api_key="none"))


def test_text(model):
    result = Agent(model).run_sync("Name three fish.", model_settings=SETTINGS | {"max_tokens": 16})
    assert result.output
    assert 0 < result.usage.output_tokens <= 16


@pytest.mark.parametrize(
    "output", [Fish, ToolOutput(Fish), NativeOutput(Fish)], ids=["default", "tool", "native"]
)
def test_output_types(model, output):
    result = Agent(model, output_type=output, retries=0).run_sync("Describe a fish.", model_settings=SETTINGS)
    assert isinstance(result.output, Fish)


def test_prompted_output(model):
    # The schema is only in the prompt; the server holds the model to JSON, its fields are the model's part.
    agent = Agent(model, output_type=PromptedOutput(Fish), retries=0)
    with capture_run_messages() as messages, contextlib.suppress(UnexpectedModelBehavior):
        agent.run_sync("Describe a fish.", model_settings=SETTINGS)
    assert messages[1].text.lstrip().startswith("{")


def test_tools(model):
    called = []

    def get_weather(city: Literal["Paris", "Oslo", "Lima"]) -> str:
        """Look up the weather in a city."""
        called.append(city)
        return "rain"

    # With an output type the model must call a tool: this one or the output.
    agent = Agent(model, output_type=Fish, tools=[get_weather], retries=0)
    try:
        agent.run_sync(QUESTION, model_settings=SETTINGS, usage_limits=UsageLimits(request_limit=2))
    except UsageLimitExceeded:
        assert called


def test_stream(model):
    async def main():
        settings = SETTINGS | {"max_tokens": 16}
        async with Agent(model).run_stream("Name three fish.", model_settings=settings) as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    whole = Agent(model).run_sync("Name three fish.", model_settings=SETTINGS | {"max_tokens": 16})
    assert asyncio.run(main()) == whole.output
