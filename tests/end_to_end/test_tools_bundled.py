"""Tools with a bundled model: calls that must come are valid, whatever so small a model would write."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from served import run_served

from at_hand import bundled_model
from shoal.cluster.router.router import Router
from shoal.core import Service
from shoal.engine import EngineOptions
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
    },
    "required": ["city", "unit"],
}
NOW = {"type": "object", "properties": {"zone": {"$ref": "#/$defs/Zone"}}, "required": ["zone"]} | {
    "$defs": {"Zone": {"type": "string", "maxLength": 20}}
}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": TOOLS,
    "max_tokens": 400,
}


def check(calls: list[dict[str, Any]]) -> list[str]:
    """The names of the calls, whose arguments must be valid."""
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema_rs.validate(SCHEMAS[call["function"]["name"]], arguments)
    return [call["function"]["name"] for call in calls]


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def calls_are_valid(client: httpx.AsyncClient, _: Router) -> None:
    """Required and named calls, greedy and hot, alone and in one batch with unconstrained chats."""
    named = {"type": "function", "function": {"name": "now"}}
    asked = [
        chat(client, tool_choice=choice, temperature=temperature, seed=seed, parallel_tool_calls=False)
        for choice in ("required", named)
        for temperature, seed in ((0, 0), (1.5, 1), (1.5, 2))
    ]
    plain, *choices = await asyncio.gather(chat(client, tool_choice="none", max_tokens=8), *asked)
    assert "tool_calls" not in plain["message"]
    for number, choice in enumerate(choices):
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (name,) = check(choice["message"]["tool_calls"])
        assert name == "now" or number < 3
    several = await chat(client, tool_choice="required", temperature=0)
    if several["finish_reason"] == "tool_calls":
        assert check(several["message"]["tool_calls"])
    refused = await client.post(
        "/v1/chat/completions",
        json=CHAT
        | {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}],
        },
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"


def test_calls_that_must_come_are_valid() -> None:
    folder: Path = bundled_model("smollm2")
    options = EngineOptions(
        services=(Service(name="smollm2", model="smollm2"),),
        kv_cache=KVCacheOptions(memory_bytes=256 << 20),
    )
    run_served(options, {"smollm2": folder}, {"smollm2": Tokenizer.from_folder(folder)}, calls_are_valid)
