"""Stream: the async iterator over the deltas of one call, which joins unread deltas."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from shoal.frontend.reader import Delta
from shoal.frontend.timeline import Timeline

# Unread deltas are joined, as each takes much more memory than the text of a token. More are not joined, as
# formatting a large delta delays other streams.
_MAX_JOINED = 64


class Stream(AsyncIterator[Delta]):
    """The deltas of all choices of one call, those of each choice in order.

    Ends after the last delta of the last choice, or raises InvalidRequest, SLOExpired, ServiceUnavailable or
    EngineDied after the earlier deltas. Closing it early cancels the unfinished choices. A slow reader delays
    no other stream: unread deltas are joined, so that they take little memory.
    """

    def __init__(self, call_id: str, prompt_tokens: int, close: Callable[[], None]) -> None:
        self.id = call_id
        self.prompt_tokens = prompt_tokens
        self.load_ns = 0
        """Time that the call waited for its service to load; 0: it was loaded."""
        self.timelines: Sequence[Timeline] = ()
        """Of the choices, where a router keeps them."""
        self._close = close
        # By choice, longest unread first; lists of deltas to be joined.
        self._unread: dict[int, deque[list[Delta]]] = {}
        self._error: Exception | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def push(self, delta: Delta) -> None:
        """Add a delta; called by the owner of the stream."""
        unread = self._unread.get(delta.choice)
        if unread is None:
            self._unread[delta.choice] = deque([[delta]])
        elif len(unread[-1]) < _MAX_JOINED:
            unread[-1].append(delta)
        else:
            unread[-1] = [_join(unread[-1])]
            unread.append([delta])
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the stream, with an error or after the last delta; called by the owner."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called; deltas may still be unread."""
        return self._ended

    async def __anext__(self) -> Delta:
        """The joined deltas of the choice that is unread for longest."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        choice, unread = next(iter(self._unread.items()))
        deltas = unread.popleft()
        if not unread:
            del self._unread[choice]
        return _join(deltas)

    async def aclose(self) -> None:
        """Cancel the unfinished choices, and drop unread deltas."""
        if not self._ended:
            self._close()
        self._ended, self._error = True, None
        self._unread.clear()
        self._changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _join(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one choice."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    prompt = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=tuple(chain.from_iterable(prompt)) if prompt else None,
        embedding=next((delta.embedding for delta in deltas if delta.embedding is not None), None),
    )
