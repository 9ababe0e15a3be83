"""Instructor, in the modes that a server of OpenAI's API can carry out."""

import instructor
import openai
import pytest
from shapes import Fish

DESCRIBE = [{"role": "user", "content": "Describe one fish."}]


def patched(server, mode):
    return instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
)
def test_extraction(server, mode):
    fish = patched(server, mode).chat.completions.create(
        model=server.model, messages=DESCRIBE, response_model=Fish, max_tokens=200, max_retries=0
    )
    assert isinstance(fish, Fish)


def test_default_mode(server):
    client = instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0))
    fish, answer = client.chat.completions.create_with_completion(
        model=server.model, messages=DESCRIBE, response_model=Fish, max_tokens=200, max_retries=0
    )
    assert isinstance(fish, Fish)
    assert answer.usage.completion_tokens > 0


def test_partial_stream(server):
    client = patched(server, instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=server.model, messages=DESCRIBE, response_model=Fish, max_tokens=200, max_retries=0
    )
    Fish.model_validate(last.model_dump())
