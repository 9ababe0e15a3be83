"""OpenAI's Agents SDK, with its default model class (the Responses API) and the other one."""

import asyncio

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded
from shapes import CITIES, QUESTION, Fish

# Enough to finish: with this client an answer that was cut is an error.
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


@pytest.fixture(params=[True, False], ids=["default", "chat"])
def config(request, server):
    # A client of its own: the provider's shared one belongs to the event loop of the first test.
    client = openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client, use_responses=request.param)
    return RunConfig(
        model=server.model,
        model_provider=provider,
        tracing_disabled=True,
        model_settings=SETTINGS,
    )


def test_text(config):
    agent = Agent(name="namer", instructions="Be short.")
    assert Runner.run_sync(agent, "Name three fish.", run_config=config).final_output


def test_the_default_provider(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.v1)
    config = RunConfig(model=server.model, tracing_disabled=True, model_settings=SETTINGS)
    run = Runner.run_sync(Agent(name="namer"), "Name three fish.", run_config=config)
    assert run.final_output


def test_stream(config):
    agent = Agent(name="namer")

    async def main():
        run = Runner.run_streamed(agent, "Name three fish.", run_config=config)
        kinds = [event.type async for event in run.stream_events()]
        return run.final_output, kinds

    text, kinds = asyncio.run(main())
    assert text
    assert "raw_response_event" in kinds


def test_output_type(config):
    agent = Agent(name="describer", instructions="Describe the fish as JSON.", output_type=Fish)
    assert isinstance(Runner.run_sync(agent, "An eel.", run_config=config).final_output, Fish)


def test_tools(config):
    called = []

    @function_tool
    def get_weather(city: str) -> str:
        """Look up the weather in a city."""
        called.append(city)
        return "rain"

    agent = Agent(
        name="forecaster",
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
    )
    try:
        run = Runner.run_sync(agent, f"{QUESTION} One of {CITIES}.", max_turns=3, run_config=config)
        assert isinstance(run.final_output, str)
    except MaxTurnsExceeded:
        pass
    assert called
