"""What the HTTP server needs from engines and a tokenizer.

``shoal.cluster.router.router.Router`` and ``shoal.serve.tokenizers.ServedTokenizer`` provide it. These are
protocols, so that the server can run in front of anything that serves requests.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shoal.cluster.options import EnginePlan
from shoal.cluster.status import ClusterInfo, EngineStatus, ServiceStatus
from shoal.core import SLO, SamplingParams, Service
from shoal.core.service import NO_GOALS
from shoal.frontend.reader import Delta
from shoal.models.chat_template.template import ChatTemplate
from shoal.models.tokenizer.messages import Encoded, Tokenized


class DeltaStream(Protocol):
    """The deltas of all choices of one prompt; deltas that were not read yet may be joined."""

    @property
    def load_ns(self) -> int:
        """How long the prompt waited until its service was loaded; 0: it was."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The stream itself."""

    async def __anext__(self) -> Delta:
        """The next delta; raises StopAsyncIteration at the end.

        Raises ServiceUnavailable if no engine of the service came back, EngineDied if engines die of the
        request, SLOExpired if it waited too long.
        """

    async def aclose(self) -> None:
        """Cancel what is unfinished."""


class TextCodec(Protocol):
    """Text and chats to tokens, and tokens to text and bytes.

    What may take long happens outside the event loop, and short texts need not wait for long ones.
    """

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat_template`` exists."""

    @property
    def chat_template(self) -> ChatTemplate:
        """Renders chats as text; raises InvalidRequest where there is none."""

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Encoded:
        """Token ids of texts, up to the first that has more than ``most_tokens``; None: of all.

        Raises InvalidRequest for a text that cannot be encoded, and ServiceUnavailable.
        """

    async def tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
        """Token ids of a text as JSON, and the text of each if ``with_strings``; raises the same."""

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of many tokens, special ones included; raises the same."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a few tokens."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; they may be a part of a character."""

    def special_token(self, text: str) -> int | None:
        """The special token with this text; None where there is none."""

    def close(self) -> None:
        """No text will be encoded any more; only once."""


class Administration(Protocol):
    """Changes of engines and services; each method returns when the change is made."""

    async def add_service(
        self,
        service: Service,
        folder: Path,
        tokenizer: TextCodec,
        engines: Sequence[str] | None = None,
    ) -> None:
        """Load a new service; returns when an engine serves it.

        folder: where its model is. engines: names of those that are to serve it; None: all.
        Raises ConfigError if no engine can load it.
        """

    async def remove_service(self, name: str) -> None:
        """Take no more requests for a service; returns when those before have ended and no engine has it."""

    async def load_service(self, name: str) -> None:
        """Load a service that was unloaded; raises ConfigError if it cannot be."""

    async def unload_service(self, name: str) -> None:
        """Unload a service once it has no requests; it stays known, and the next request loads it."""

    async def keep_service(self, name: str, idle_after_s: float | None) -> None:
        """Unload a service when it had no request for so long, until it is loaded again; None: never.

        With 0 it is unloaded when this returns, unless it has requests.
        """

    async def add_engine(self, plan: EnginePlan) -> None:
        """Start a further engine; returns when it is ready; raises EngineDied if it does not start."""

    def check_leaving(self, name: str) -> None:
        """Raise ConfigError if an engine cannot be drained or removed: services would have none."""

    def drain_engine(self, name: str) -> None:
        """Give an engine no more requests, and move those that it has to others."""

    def undrain_engine(self, name: str) -> None:
        """Let an engine that was drained take requests again."""

    async def remove_engine(self, name: str) -> None:
        """End an engine, whose requests go on elsewhere; raises ConfigError if it is the last."""


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

    def wakes(self, service: str) -> bool:
        """Whether requests of a service wait until engines that run have loaded it."""

    @property
    def administration(self) -> Administration:
        """Changes the engines and services."""

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
