"""Interfaces that the HTTP server needs: the cluster of engines, and tokenizers.

``shoal.cluster.router.router.Router`` and ``shoal.serve.tokenizers.ServedTokenizer`` implement them. They are
protocols, so that the server can run in front of a fake cluster, without engine processes.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from shoal.cluster.options import EnginePlan
from shoal.cluster.placing.status import PlacingStatus, Proposal
from shoal.cluster.status import ClusterInfo, EngineStatus, RequestTable, ServiceStatus
from shoal.core import SLO, Client, SamplingParams, Service
from shoal.core.service import NO_GOALS
from shoal.frontend.stream import Stream
from shoal.models.chat_template.template import ChatTemplate
from shoal.models.tokenizer.messages import Encoded, Tokenized


class TextCodec(Protocol):
    """Text and chats to tokens, and tokens to text and bytes.

    Slow work happens outside the event loop, and short texts do not wait for long ones.
    """

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> ChatTemplate:
        """Renders chats as text; raises InvalidRequest where there is none."""

    async def ready(self) -> None:
        """Wait until the methods below that are not coroutines may be called; raises ServiceUnavailable."""

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Encoded:
        """Token ids of texts, up to the first text with more than ``most_tokens``; None: of all.

        Raises InvalidRequest for a text that cannot be encoded, and ServiceUnavailable.
        """

    async def tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
        """Token ids of a text as JSON, and the text of each token if ``with_strings``; raises the same."""

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of many tokens, special ones included; raises the same."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a few tokens, at once."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""

    def special_token(self, text: str) -> int | None:
        """The special token with this text; None where there is none."""

    def close(self) -> None:
        """Release the tokenizer; call once, when no more text will be encoded."""


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

        folder: of its model. engines: names of the engines that will serve it; None: all.
        Raises ConfigError if no engine can load it.
        """

    async def remove_service(self, name: str) -> None:
        """Reject new requests for a service; returns when its requests have ended and no engine has it."""

    async def load_service(self, name: str) -> None:
        """Load a service that was unloaded; raises ConfigError if it cannot be."""

    async def unload_service(self, name: str) -> None:
        """Unload a service once it has no requests; the next request loads it again."""

    async def pin_service(self, name: str, pinned: bool) -> None:
        """Keep the weights of a service in the memory of its engines, or let them come and go again.

        Raises ConfigError if an engine has too little memory for that.
        """

    async def set_engines(self, service: str, engines: Sequence[str]) -> None:
        """Have exactly these engines take requests of a service; raises ConfigError if one cannot load it."""

    async def propose_placement(self, *, apply: bool) -> Proposal:
        """Search a placement for the latest traffic; apply: and change to it, if it is worth it.

        Raises ConfigError if there is nothing to search with, or if the change is given up.
        """

    async def keep_service(self, name: str, idle_after_s: float | None) -> None:
        """Unload a service after ``idle_after_s`` without a request; None: never.

        This holds until the next load. With 0 the service is unloaded when this returns, unless it has
        requests.
        """

    async def add_engine(self, plan: EnginePlan) -> None:
        """Start another engine; returns when it is ready. Raises EngineDied if it does not start."""

    def check_leaving(self, name: str) -> None:
        """Raise ConfigError if an engine cannot be drained or removed because services would have none."""

    def drain_engine(self, name: str) -> None:
        """Send an engine no more requests, and migrate its requests to other engines."""

    def undrain_engine(self, name: str) -> None:
        """Send requests to a drained engine again."""

    async def activate_engine(self, name: str) -> None:
        """Start an engine on standby; returns when it is ready.

        Raises ConfigError if it is not on standby, EngineDied if it does not start.
        """

    async def deactivate_engine(self, name: str) -> None:
        """Migrate the requests of an engine to others, and end it until it is activated.

        Returns when it has ended. Raises ConfigError if services would have no engine, or if it is activated
        meanwhile.
        """

    async def remove_engine(self, name: str) -> None:
        """Stop an engine; its requests continue on other engines. Raises ConfigError if it is the last."""


class Backend(Protocol):
    """The cluster of engines, as the server sees it."""

    @property
    def info(self) -> ClusterInfo:
        """Services and their limits."""

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """Current status of every engine."""

    @property
    def wanted_engines(self) -> int:
        """Number of engines that are to run."""

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        """Current status of every service, by name."""

    @property
    def placing(self) -> PlacingStatus:
        """What the placement policy did last."""

    def waits_for_load(self, service: str) -> bool:
        """Whether requests of a service wait until engines that run have loaded it."""

    def requests(self, most: int, services: Set[str] | None = None) -> RequestTable:
        """Unfinished requests, the oldest first, and the last that ended; at most ``most`` of each.

        services: of these alone; None: of all.
        """

    @property
    def administration(self) -> Administration: ...

    @property
    def unfinished(self) -> int:
        """Number of unfinished choices."""

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
        client: Client | None = None,
    ) -> Stream:
        """Start ``sampling.n`` choices; raises InvalidRequest, QueueFull, ServiceUnavailable or EngineDied.

        slo: latency goals that override those of the service. arrival_ns: on the monotonic clock; None: now.
        priority, cache_salt, client: as in ``shoal.core.Request``. log_name: the request's name in the log.
        """
