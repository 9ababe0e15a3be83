"""The simulated network between engines: links with a rate and a latency, for KV transfers."""

import sys
from collections import Counter, deque
from collections.abc import Callable
from math import ceil

from shoal.core.cluster import Link
from shoal.engine.migration.transfer import Arrived, Blocks
from shoal.simulate.timers import Timers

_MESSAGE_S = 1.0
"""Longest message, in link time, so that a long transfer reports progress."""
_NO_BYTES = memoryview(b"")


class Network:
    """A network whose links are all equal.

    An engine sends one transfer at a time and receives one at a time; others queue in the order in which they
    were sent. A transfer takes its bytes over the link's rate, and arrives after the latency. block_bytes:
    size of a block of a migration, by its id. clock: the simulation's.
    """

    def __init__(
        self, link: Link, timers: Timers, clock: Callable[[], int], block_bytes: Callable[[str], int]
    ) -> None:
        self.latency_ns = max(1, round(link.latency_s * 1e9))
        """Latency of a message."""
        self.message_bytes = max(1, round(link.bytes_per_s * _MESSAGE_S))
        """Approximate limit on messages."""
        self._ns_per_byte = 1e9 / link.bytes_per_s
        self._timers = timers
        self._clock = clock
        self._block_bytes = block_bytes
        self._ports: dict[str, Port] = {}
        self._opened = 0
        self._sends_until_ns: Counter[int] = Counter()
        self._takes_until_ns: Counter[int] = Counter()

    def open(self, engine: int, on_change: Callable[[], None]) -> "Port":
        """Open the port of a starting engine; on_change: called when KV has arrived, or can be sent again."""
        self._opened += 1
        port = Port(self, engine, f"{engine}/{self._opened}", on_change)
        self._ports[port.endpoint] = port
        return port

    def close(self, port: "Port") -> None:
        """Close the port of an engine; transfers to and from it are lost."""
        del self._ports[port.endpoint]

    def carry(self, source: "Port", to: str, blocks: Blocks) -> None:
        """Send blocks."""
        # A nanosecond later, so that of simultaneous senders the lowest number comes first.
        self._timers.set(self._clock() + 1, lambda: self._enter(source, to, blocks), source.engine)

    def _enter(self, source: "Port", to: str, blocks: Blocks) -> None:
        """Queue blocks for the links of both ends."""
        target = int(to.partition("/")[0])
        start_ns = max(self._clock(), self._sends_until_ns[source.engine], self._takes_until_ns[target])
        takes_ns = ceil(blocks.count * self._block_bytes(blocks.migration) * self._ns_per_byte)
        self._sends_until_ns[source.engine] = self._takes_until_ns[target] = start_ns + takes_ns
        arrives_ns = start_ns + takes_ns + self.latency_ns
        self._timers.set(arrives_ns, lambda: self._arrive(source, to, blocks), source.engine)

    def _arrive(self, source: "Port", to: str, blocks: Blocks) -> None:
        if source.endpoint in self._ports:
            if to in self._ports:
                self._ports[to].take(blocks)
            source.delivered(to)


class Port:
    """One engine's port on the network, as a ``KVTransfer``.

    Reading and writing KV takes no time. It sends one message at a time to each engine.
    """

    turn_bytes = sys.maxsize

    def __init__(self, network: Network, engine: int, endpoint: str, on_change: Callable[[], None]) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self._network = network
        self._on_news = on_change
        self._arrived: deque[Arrived] = deque()
        self._under_way: set[str] = set()

    @property
    def message_bytes(self) -> int:
        """Approximate limit on messages."""
        return self._network.message_bytes

    def can_receive(self) -> bool:
        return bool(self._arrived)

    def receive(self) -> Arrived | None:
        return self._arrived.popleft() if self._arrived else None

    def can_send(self, to: str) -> bool:
        return to not in self._under_way

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks; their content is ignored."""
        self._under_way.add(to)
        self._network.carry(self, to, blocks)

    def disconnect(self, to: str) -> None:
        """Transfers under way still arrive."""

    def take(self, blocks: Blocks) -> None:
        self._arrived.append(Arrived(blocks, _NO_BYTES))
        self._on_news()

    def delivered(self, to: str) -> None:
        """The transfer under way has arrived, or is lost."""
        self._under_way.discard(to)
        self._on_news()
