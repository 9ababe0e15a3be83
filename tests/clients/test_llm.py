"""The ``llm`` command, with the server among its models as its manual says (extra-openai-models.yaml)."""

import json

import pytest
from shapes import QUESTION, Fish


@pytest.fixture
def llm(server, run_client, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"""
- model_id: fish
  model_name: {server.model}
  api_base: {server.v1}
  supports_schema: true
  supports_tools: true
- model_id: fish-completion
  model_name: {server.model}
  api_base: {server.v1}
  completion: true
"""
    )
    return lambda *arguments: run_client("llm", "prompt", *arguments, "-o", "max_tokens", "100")


def test_stream_joins_to_the_whole(llm):
    ask = ["Name three fish.", "-m", "fish", "-o", "temperature", "0"]
    streamed = llm(*ask)
    assert streamed.strip()
    assert llm(*ask, "--no-stream") == streamed


def test_completion(llm):
    assert llm("Eels live in", "-m", "fish-completion").strip()


def test_schema(llm):
    answer = llm("Describe a fish.", "-m", "fish", "--schema", json.dumps(Fish.model_json_schema()))
    Fish.model_validate_json(answer)


def test_tools(llm):
    # Whether it calls the tool is for the model to say.
    tool = 'def get_weather(city: str) -> str:\n    "Look up the weather."\n    return "rain"\n'
    assert llm(QUESTION, "-m", "fish", "--functions", tool, "--chain-limit", "3").strip()
