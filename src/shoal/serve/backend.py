"""What the HTTP server asks of an engine and of a tokenizer.

``shoal.engine.EngineHandle`` and ``shoal.models.Tokenizer`` offer it; written down as protocols so
that the server can stand before anything that answers requests.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from shoal.core import SLO, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.engine.info import EngineInfo
from shoal.engine.reader import Delta
from shoal.engine.vitals import Vitals
from shoal.models.chat_template import ChatTemplate


class DeltaStream(Protocol):
    """The deltas of one accepted prompt, of all its choices in one stream; unread ones may be joined."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The stream itself."""

    async def __anext__(self) -> Delta:
        """The next delta; raises EngineDied if the engine ended, StopAsyncIteration at the end."""

    async def aclose(self) -> None:
        """Cancel what is unfinished."""


class Backend(Protocol):
    """An engine, seen from a client."""

    @property
    def info(self) -> EngineInfo:
        """Services and their limits."""

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""

    async def submit(
        self,
        service: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        slo: SLO = NO_GOALS,
        arrival_ns: int | None = None,
    ) -> DeltaStream:
        """Start ``sampling.n`` outputs; raises InvalidRequest, QueueFull or EngineDied.

        slo: goals that go before those of the service. arrival_ns: when the request came, on the monotonic
        clock; None: now.
        """

    @property
    def vitals(self) -> Vitals:
        """Signs of life, and the latest counters and gauges."""


class TextCodec(Protocol):
    """Text and chats to tokens, and tokens to bytes."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be written down as tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, which may be part of a character."""

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these come of ``text``; cheap, and 0 where nothing can be said."""

    @property
    def chat_template(self) -> ChatTemplate:
        """What lays out chats; raises InvalidRequest where there is none."""
