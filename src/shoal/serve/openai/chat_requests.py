"""From the body of a chat in any API to its generation request: prompt, token counts, limits."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request

from shoal.core import SamplingDefaults, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.serve.api import Api
from shoal.serve.generation import GenerationRequest
from shoal.serve.http.request_context import context_of
from shoal.serve.openai.chat_fields import TemplateFields
from shoal.serve.openai.chat_prompt import PreparedChat, prepare_chat
from shoal.serve.openai.error_field_names import FieldNames, client_field_names
from shoal.serve.openai.nested_objects import Goals
from shoal.serve.tools.tool_use import ToolUse


class PromptBody(Protocol):
    """The body of a chat, as far as it makes a prompt."""

    @property
    def model(self) -> str: ...

    def conversation_messages(self) -> Sequence[Mapping[str, Any]]:
        """The messages for the chat template."""

    def tool_use(self) -> ToolUse: ...

    def template_fields(self) -> TemplateFields: ...

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams: ...


class AnswerBody(PromptBody, Protocol):
    """The body of a chat that is to be answered."""

    @property
    def slo(self) -> Goals | None: ...


class ChatRequests:
    """Makes the requests of one API. prefix: of ids. field_names: the client's names of fields."""

    def __init__(self, api: Api, prefix: str, field_names: FieldNames) -> None:
        self._api = api
        self._prefix = prefix
        self._field_names = field_names

    async def count_tokens(self, request: Request, body: PromptBody) -> int:
        """The number of prompt tokens, even beyond the context."""
        chat = await self._prepare(request, body)
        (tokens,) = await self._api.encode(body.model, [chat.text], add_special_tokens=False, unlimited=True)
        return len(tokens)

    async def make(
        self, request: Request, body: AnswerBody, arrival_ns: int
    ) -> tuple[PreparedChat, GenerationRequest]:
        """The chat as a prompt, and the request that answers it."""
        chat = await self._prepare(request, body)
        with client_field_names(self._field_names):
            tokens = await self._api.encode(body.model, [chat.text], add_special_tokens=False)
        slo = NO_GOALS if body.slo is None else body.slo.slo()
        generation = GenerationRequest(
            id=f"{self._prefix}_{context_of(request.scope).id}",
            service=body.model,
            prompts=tokens,
            sampling=chat.sampling,
            arrival_ns=arrival_ns,
            slo=slo,
            client=context_of(request.scope).client,
            pace_s=self._api.pace_s(body.model, slo),
            field_names=chat.field_names,
        )
        return chat, generation

    async def _prepare(self, request: Request, body: PromptBody) -> PreparedChat:
        card = self._api.card(request, body.model, "model")
        return await prepare_chat(
            self._api,
            body.model,
            body.conversation_messages(),
            body.tool_use(),
            body.template_fields(),
            body.sampling(card.sampling_defaults),
            self._field_names,
        )
