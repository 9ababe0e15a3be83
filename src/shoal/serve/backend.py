"""What the HTTP server needs from engines and a tokenizer.

``shoal.cluster.router.Router`` and ``shoal.models.Tokenizer`` provide it. These are protocols, so that the
server can run in front of anything that serves requests.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from shoal.cluster.status import ClusterInfo, EngineStatus, ServiceStatus
from shoal.core import SLO, SamplingParams
from shoal.core.service import NO_GOALS
from shoal.engine.reader import Delta
from shoal.models.chat_template import ChatTemplate


class DeltaStream(Protocol):
    """The deltas of all choices of one prompt; deltas that were not read yet may be joined."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The stream itself."""

    async def __anext__(self) -> Delta:
        """The next delta; raises StopAsyncIteration at the end.

        Raises ServiceUnavailable if no engine of the service came back, EngineDied if engines die of the
        request, GoalsOutOfReach if it waited too long.
        """

    async def aclose(self) -> None:
        """Cancel what is unfinished."""


class Backend(Protocol):
    """Engines, as their client sees them."""

    @property
    def info(self) -> ClusterInfo:
        """The services and their limits."""

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """The engines, as they are now."""

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        """The services by name, as they are now."""

    @property
    def unfinished(self) -> int:
        """Choices that have not ended."""

    async def submit(
        self,
        service: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        slo: SLO = NO_GOALS,
        arrival_ns: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        log_name: str | None = None,
    ) -> DeltaStream:
        """Start ``sampling.n`` outputs; raises InvalidRequest, QueueFull, ServiceUnavailable or EngineDied.

        slo: latency goals that override those of the service. arrival_ns: arrival of the request on the
        monotonic clock; None: now. priority, cache_salt: as in ``shoal.core.Request``. log_name: what the log
        calls the request.
        """


class TextCodec(Protocol):
    """Text and chats to tokens, and tokens to bytes."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat_template`` exists."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; they may be a part of a character."""

    def special_token(self, text: str) -> int | None:
        """The special token with this text; None where there is none."""

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of ``text``, cheap to compute; 0 where none is known."""

    @property
    def chat_template(self) -> ChatTemplate:
        """Renders chats as text; raises InvalidRequest where there is none."""
