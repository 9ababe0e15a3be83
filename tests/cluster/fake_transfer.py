"""KV on its way between engines of this process, in virtual time; it comes late, and may be lost."""

from collections import deque
from typing import TYPE_CHECKING

from shoal.engine.migration.transfer import Arrived, Blocks

if TYPE_CHECKING:
    from fake_cluster import FakeBackend, FakeProcess

QUEUED = 2
"""Messages on their way from one engine; more are not taken."""


class FakeTransfer:
    """Implements ``KVTransfer`` for one process."""

    message_bytes = 2 << 20
    turn_bytes = 16 << 20

    def __init__(self, backend: "FakeBackend", process: "FakeProcess") -> None:
        self._backend = backend
        self._process = process
        self._arrived: deque[Arrived] = deque()
        self._sent: deque[tuple[str, Arrived]] = deque()

    def can_receive(self) -> bool:
        return bool(self._arrived)

    def receive(self) -> Arrived | None:
        return self._arrived.popleft() if self._arrived else None

    def can_send(self, to: str) -> bool:
        return len(self._sent) < QUEUED

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        self._sent.append((to, Arrived(blocks, memoryview(bytes(content)))))
        self._backend.loop.call_later(self._backend.random.uniform(0, 0.05), self._arrive)

    def disconnect(self, to: str) -> None:
        pass

    def _arrive(self) -> None:
        to, arrived = self._sent.popleft()
        name, _, incarnation = to.partition("/")
        target = self._backend.processes[name]
        reaches = target.incarnation == int(incarnation) and target.alive and self._process.alive
        if reaches and self._backend.random.random() >= self._backend.lost_kv:
            target.transfer._arrived.append(arrived)
