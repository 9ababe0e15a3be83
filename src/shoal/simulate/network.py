"""Links between simulated engines, and KV that takes its time on them."""

import sys
from collections import Counter, deque
from collections.abc import Callable
from math import ceil

from shoal.core.cluster import Link
from shoal.engine.migration.transfer import Arrived, Blocks
from shoal.simulate.timers import Timers

_MESSAGE_S = 1.0
"""A message is at most what a link carries in this time: who waits for news of it hears that it goes on."""
_NO_BYTES = memoryview(b"")


class Network:
    """Engines whose links are all alike.

    An engine sends one transfer at a time and takes one at a time; others wait for their turn, in the order
    in which they were sent. A transfer takes its bytes over the link's rate, and arrives after the latency.
    block_bytes: of a block of a migration, by its id. clock: the simulation's.
    """

    def __init__(
        self, link: Link, timers: Timers, clock: Callable[[], int], block_bytes: Callable[[str], int]
    ) -> None:
        self.latency_ns = max(1, round(link.latency_s * 1e9))
        """How long the shortest message takes."""
        self.message_bytes = max(1, round(link.bytes_per_s * _MESSAGE_S))
        """About the longest message."""
        self._ns_per_byte = 1e9 / link.bytes_per_s
        self._timers = timers
        self._clock = clock
        self._block_bytes = block_bytes
        self._ports: dict[str, Port] = {}
        self._opened = 0
        self._sends_until_ns: Counter[int] = Counter()
        self._takes_until_ns: Counter[int] = Counter()

    def open(self, engine: int, on_news: Callable[[], None]) -> "Port":
        """The end of an engine that begins; on_news: told when KV came, or can be sent again."""
        self._opened += 1
        port = Port(self, engine, f"{engine}/{self._opened}", on_news)
        self._ports[port.endpoint] = port
        return port

    def close(self, port: "Port") -> None:
        """The engine is gone, and what is on its way to it or from it is lost."""
        del self._ports[port.endpoint]

    def carry(self, source: "Port", to: str, blocks: Blocks) -> None:
        """Take blocks on their way."""
        # A nanosecond later, so that of engines that send at once the first is that of the lowest number.
        self._timers.set(self._clock() + 1, lambda: self._enter(source, to, blocks), source.engine)

    def _enter(self, source: "Port", to: str, blocks: Blocks) -> None:
        """Blocks queue for the links of both ends."""
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
    """One engine's end of the network, as a ``KVTransfer``.

    Reading and writing KV takes an engine no time here. It sends one message at a time to each engine.
    """

    turn_bytes = sys.maxsize

    def __init__(self, network: Network, engine: int, endpoint: str, on_news: Callable[[], None]) -> None:
        self.engine = engine
        """The number of the engine."""
        self.endpoint = endpoint
        """Its address."""
        self._network = network
        self._on_news = on_news
        self._arrived: deque[Arrived] = deque()
        self._under_way: set[str] = set()

    @property
    def message_bytes(self) -> int:
        """About the longest message."""
        return self._network.message_bytes

    def can_receive(self) -> bool:
        """Whether something has come."""
        return bool(self._arrived)

    def receive(self) -> Arrived | None:
        """The next blocks that have come, if any."""
        return self._arrived.popleft() if self._arrived else None

    def can_send(self, to: str) -> bool:
        """Whether nothing is on its way there."""
        return to not in self._under_way

    def send(self, to: str, blocks: Blocks, content: memoryview) -> None:
        """Send blocks, of which only the number counts."""
        self._under_way.add(to)
        self._network.carry(self, to, blocks)

    def disconnect(self, to: str) -> None:
        """What was sent still goes."""

    def take(self, blocks: Blocks) -> None:
        """Blocks have come."""
        self._arrived.append(Arrived(blocks, _NO_BYTES))
        self._on_news()

    def delivered(self, to: str) -> None:
        """What was sent there has arrived, or is lost."""
        self._under_way.discard(to)
        self._on_news()
