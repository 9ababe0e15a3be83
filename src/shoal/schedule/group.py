"""One service's requests inside the scheduler."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from shoal.forecast import LengthHistory
from shoal.kvcache import ServiceLayout
from shoal.schedule.crowd import Crowd, Members
from shoal.schedule.sharing import SharedPrefixes
from shoal.schedule.tracked import Tracked


class GroupView(Protocol):
    """What policies may read of a service.

    waiting: without KV, first to be admitted first; evicted requests are back in the order of submission.
    running: with KV, longest admitted first. prefills: those of them whose known tokens are not all
    scheduled, in the same order. last_step: number of the last plan for this service (-1: none yet).
    """

    @property
    def service(self) -> str: ...  # noqa: D102
    @property
    def waiting(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def running(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def prefills(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def last_step(self) -> int: ...  # noqa: D102


class Group:
    """Queue, running requests, length history and shared prefixes of one service."""

    def __init__(self, layout: ServiceLayout, block_size: int, history: LengthHistory) -> None:
        self.service = layout.service
        self.history = history
        self.waiting: deque[Tracked] = deque()
        self.running: list[Tracked] = []
        self.prefills: list[Tracked] = []
        self.last_step = -1
        self.shared = SharedPrefixes()
        self._layout = layout
        self._block_size = block_size
        self._members: Members | None = None
        self._crowd: Crowd | None = None

    def changed(self, *, members: bool) -> None:
        """Tokens or (``members``) the running requests or their shared blocks changed."""
        self._crowd = None
        if members:
            self._members = None

    def crowd(self) -> Crowd:
        """A snapshot of the running requests, made again only after a change."""
        if self._crowd is None:
            if self._members is None:
                tables = [(one.blocks, one.shareable) for one in self.running]
                self._members = Members.of(self.running, self.shared.sets(tables))
            self._crowd = Crowd.of(self._layout, self._block_size, self._members, self.running, self.history)
        return self._crowd

    def crowd_with(
        self, crowd: Crowd, joined: Sequence[Tracked], newcomer: Tracked, hits: Sequence[int]
    ) -> Crowd:
        """``crowd`` (those running and ``joined``) and one more that would begin with the blocks ``hits``."""
        if not hits:
            return crowd.plus(newcomer, crowd.members.shared)
        self.shared.hold(hits)
        tables = [(one.blocks, one.shareable) for one in (*self.running, *joined)]
        shared = self.shared.sets([*tables, (hits, len(hits))])
        self.shared.drop(hits)
        return crowd.plus(newcomer, shared)

    def put_back(self, request: Tracked) -> None:
        """An evicted request waits again, before all that were submitted after it."""
        place = 0
        while place < len(self.waiting) and self.waiting[place].number < request.number:
            place += 1
        self.waiting.insert(place, request)
