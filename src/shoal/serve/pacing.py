"""Pacing: tokens that come in bursts are passed on one after another, while more are to come."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator

from shoal.frontend.reader import Delta

Indexed = tuple[int, Delta]
"""A delta, and the index of its choice."""


class Pacer:
    """Holds back the deltas of one choice, but never so long that its stream has a gap above the goal.

    So two deltas are at least the goal apart. When the output has ended, all that is held goes out at once.
    All times are in seconds of one clock.
    """

    def __init__(self, goal_s: float) -> None:
        self._goal_s = goal_s
        self._held: deque[tuple[float, Delta]] = deque()
        """With the time when each came."""
        self._free_s = 0.0
        """When the next delta with tokens may go out."""
        self._ended = False

    def push(self, delta: Delta, now_s: float) -> None:
        """Add a delta."""
        self._held.append((now_s, delta))
        self._ended = self._ended or delta.finish is not None

    @property
    def due_s(self) -> float | None:
        """When the next delta goes out, 0 if at once; None: none is held."""
        if not self._held:
            return None
        return 0.0 if self._ended or not self._held[0][1].tokens else self._free_s

    def pop(self, now_s: float) -> Iterator[Delta]:
        """The deltas that go out now."""
        while (due_s := self.due_s) is not None and due_s <= now_s:
            came_s, delta = self._held.popleft()
            if delta.tokens:
                # From when it was due: late timers do not add up.
                self._free_s = max(max(came_s, self._free_s) + self._goal_s, now_s)
            yield delta

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True


async def pace(deltas: AsyncGenerator[Indexed], goal_s: float) -> AsyncGenerator[Indexed]:
    """The deltas of all choices, each choice paced; an error comes after what was held."""
    clock = asyncio.get_running_loop().time
    pacers: dict[int, Pacer] = {}
    upcoming = asyncio.ensure_future(anext(deltas))
    error: BaseException | None = None
    try:
        while error is None:
            times = [due_s for pacer in pacers.values() if (due_s := pacer.due_s) is not None]
            await asyncio.wait((upcoming,), timeout=max(0.0, min(times) - clock()) if times else None)
            if upcoming.done():
                error = upcoming.exception()
                if error is None:
                    index, delta = upcoming.result()
                    pacers.setdefault(index, Pacer(goal_s)).push(delta, clock())
                    upcoming = asyncio.ensure_future(anext(deltas))
                else:
                    for pacer in pacers.values():
                        pacer.end()
            for index, pacer in pacers.items():
                for delta in pacer.pop(clock()):
                    yield index, delta
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
    if not isinstance(error, StopAsyncIteration):
        raise error
