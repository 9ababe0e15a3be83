"""What the tests ask for: small shapes, so that any model's answer to them is short.

Clients take a tool's name from its class.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CITIES = ("Paris", "Oslo", "Lima")
QUESTION = "What is the weather in Oslo?"


class Fish(BaseModel):
    """A fish."""

    model_config = ConfigDict(extra="forbid")  # else a model may go on with fields of its own

    kind: Literal["trout", "eel", "carp"]
    weight_kg: int = Field(ge=1, le=99)
    edible: bool


class get_weather(BaseModel):
    """Look up the weather in a city."""

    city: Literal["Paris", "Oslo", "Lima"]


class get_time(BaseModel):
    """Look up the time of day in a city."""

    city: Literal["Paris", "Oslo", "Lima"]


def tool(shape: type[BaseModel]) -> dict:
    """``shape`` as a tool of OpenAI's chat completions."""
    return {
        "type": "function",
        "function": {
            "name": shape.__name__,
            "description": shape.__doc__,
            "parameters": shape.model_json_schema(),
        },
    }


TOOLS = [tool(get_weather), tool(get_time)]
TOOL_NAMES = {"get_weather", "get_time"}
