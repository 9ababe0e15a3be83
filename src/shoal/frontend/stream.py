"""What a client reads of one call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from shoal.frontend.reader import Delta

# A delta takes much more memory than the text of one token, so this many are joined; no more, since whoever
# writes them down holds up others meanwhile.
_JOINED_AT_MOST = 64


class Stream(AsyncIterator[Delta]):
    """The deltas of all choices of one call, those of each choice in order.

    Ends after the last delta of the last choice, or raises InvalidRequest, SLOExpired or EngineDied
    after the deltas that came before. Closing it early cancels what is unfinished. Reading slowly delays
    nobody else: what waits here is joined, and takes little more memory than what is in it.
    """

    def __init__(self, call_id: str, prompt_tokens: int, close: Callable[[], None]) -> None:
        self.id = call_id
        self.prompt_tokens = prompt_tokens
        self.load_ns = 0
        """How long the call waited until its service was loaded; 0: it was."""
        self._close = close
        # By choice, in the order in which they came to wait; lists of deltas to be joined.
        self._unread: dict[int, deque[list[Delta]]] = {}
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    def push(self, delta: Delta) -> None:
        """Add a delta; for the owner of the stream."""
        waiting = self._unread.get(delta.choice)
        if waiting is None:
            self._unread[delta.choice] = deque([[delta]])
        elif len(waiting[-1]) < _JOINED_AT_MOST:
            waiting[-1].append(delta)
        else:
            waiting[-1] = [_joined(waiting[-1])]
            waiting.append([delta])
        self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """No more deltas come, because of ``error`` or because all were sent; for the owner."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()

    @property
    def ended(self) -> bool:
        """Whether no more deltas come; some may still be unread."""
        return self._ended

    async def __anext__(self) -> Delta:
        """What is new in the choice that has waited longest."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        choice, waiting = next(iter(self._unread.items()))
        deltas = waiting.popleft()
        if not waiting:
            del self._unread[choice]
        return _joined(deltas)

    async def aclose(self) -> None:
        """Cancel what is unfinished; what was not read is dropped."""
        if not self._ended:
            self._close()
        self._ended, self._error = True, None
        self._unread.clear()
        self._news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Successive deltas of one choice as one."""
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
