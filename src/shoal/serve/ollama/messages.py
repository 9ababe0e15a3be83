"""Messages of Ollama's chats, with calls of tools."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.serve.strict_model import MAX_FIELDS, EmptyList, StrictModel

MAX_TOOLS = 128
Anything = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


class CalledFunction(StrictModel):
    """A function that the model called."""

    name: str
    arguments: Anything | None = None
    """None: there are none."""
    index: int | None = None
    description: str | None = None


class Call(StrictModel):
    """A call of a tool."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(StrictModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    """The assistant's reasoning, for chat templates that show it."""
    images: EmptyList | None = None
    """Not supported, must be empty."""
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    """The tool that a result is of."""
    name: str | None = None
    """What older clients call that."""
    tool_call_id: str | None = None
    """The call that a result answers."""

    @property
    def tool(self) -> str | None:
        """The tool that a result is of; None: the client does not say."""
        return self.tool_name or self.name or None
