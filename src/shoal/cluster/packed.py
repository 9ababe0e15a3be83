"""Running requests as a packer sees them: which engine has each, how much KV that is, and how it grows."""

import math
from collections.abc import Mapping, Sequence

from shoal.cluster.engine_load import Assigned, EngineLoad, Newcomer
from shoal.cluster.packing import Arrival, Changes, DeviceGroup, Growth, Occupancy, Operations, Packer
from shoal.cluster.packing.hybrid import WantedMove
from shoal.cluster.state import Engine

STAYS_EPOCHS = 5
"""A request that was moved is not moved again in so many epochs."""
AHEAD_EPOCHS = 1.25
"""Requests are as large as they will be so much later: in an epoch, and the time that moves take then."""
_UNLIMITED_BYTES = 1 << 60
"""Memory of an engine that did not say how much it has."""


class PackedCalls:
    """Lets a packer decide about the requests of all engines that take requests.

    What engines have follows from their loads, whatever else happened to requests (an engine died, a move was
    given up): the packer's books are brought in line with that before each decision. Sizes are bytes of KV,
    ``AHEAD_EPOCHS`` later.
    """

    def __init__(self, packer: Packer, engines: Mapping[str, Engine], epoch_s: float) -> None:
        self._packer = packer
        self._packing = packer.packing
        self._engines = engines
        self._epoch_s = epoch_s
        self._epochs = 0
        self._settled = False
        # Each engine's load, and how many of its changes the packer knows of.
        self._seen: dict[str, tuple[EngineLoad, int]] = {}
        # Of each service: bytes of a token's KV, and the most that an engine has for it.
        self._token_bytes: dict[str, float] = {}
        self._block_size = 1
        self._most_bytes: dict[str, int] = {}
        self._output: Mapping[str, int] = {}
        # When requests were moved, in epochs.
        self._moved: dict[str, int] = {}
        self._wanted: list[WantedMove] = []
        self._preempted: list[str] = []

    def engines_changed(self) -> None:
        """Other engines take requests, or of other services."""
        self._settled = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """Where the packer puts a request; None: it has no room, and waits."""
        gone = self._follow()
        call = newcomer.call
        size = self._size(call.request, Assigned(call, newcomer.tokens, 0, newcomer.now_ns), engines[0])
        arrival = Arrival(call.request, call.service, size.size, size.expected)
        changes = self._apply(Operations(departures=gone, arrivals=[arrival]))
        group = changes.placed.get(call.request)
        return None if group is None else self._engines[group].load

    def choose_target(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """The only one of ``engines``, or the fullest that has room for a request that leaves its own."""
        if len(engines) == 1:
            return engines[0]
        gone = self._follow()
        if gone:
            self._apply(Operations(departures=gone))
        id, groups = newcomer.call.request, self._packing.groups
        assigned = Assigned(newcomer.call, newcomer.tokens, 0, newcomer.now_ns)
        size = self._size(id, assigned, engines[0]).size
        fitting = [load for load in engines if size <= groups[load.name].idle]
        chosen = min(fitting, key=lambda load: groups[load.name].idle, default=None)
        if chosen is not None:
            self._put(id, assigned, chosen)
        return chosen

    def begin_epoch(self, output_tokens: Mapping[str, int]) -> None:
        """Requests have so many tokens of output now."""
        gone = self._follow()
        if not self._packing.groups:
            return
        self._epochs += 1
        self._moved = {id: epoch for id, epoch in self._moved.items() if id in self._packing.items}
        ended, before, self._output = set(gone), self._output, output_tokens
        updates = {}
        for name, occupancy in self._packing.groups.items():
            load = self._engines[name].load
            for item in occupancy.items.values():
                if item.id not in ended:
                    updates[item.id] = self._size(item.id, load.assigned[item.id], load, before)
        self._apply(Operations(departures=gone, updates=updates))

    def take_wanted(self) -> list[WantedMove]:
        """Moves that the packer decided on since this was asked last."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_preempted(self) -> list[str]:
        """Requests that the packer has no room for any more, since this was asked last."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def moved(self, request: str) -> None:
        """A move that was wanted has begun."""
        self._moved[request] = self._epochs

    def disobey(self, *engines: str) -> None:
        """Something that the packer wanted of requests of these engines is not done."""
        for engine in engines:
            self._seen.pop(engine, None)

    def _apply(self, operations: Operations) -> Changes:
        over = [name for name, one in self._packing.groups.items() if _growth(one, operations) > one.idle]
        changes = self._packer.apply(operations)
        for move in changes.migrations:
            if self._epochs - self._moved.get(move.id, -STAYS_EPOCHS) < STAYS_EPOCHS:
                self.disobey(move.source, move.target)
                continue
            assigned = self._engines[move.source].load.assigned[move.id]
            tokens = assigned.call.prompt_tokens + self._output.get(move.id, 0)
            self._wanted.append(
                WantedMove(
                    request=move.id,
                    source=move.source,
                    target=move.target,
                    kv_bytes=self._bytes(assigned.call.service, tokens),
                    tokens=tokens,
                    relieves=move.source in over,
                    moves_kv=self._moves_kv(assigned, move.source, move.target),
                )
            )
        self._preempted += changes.preempted
        return changes

    def _moves_kv(self, assigned: Assigned, source: str, target: str) -> bool:
        service = assigned.call.service
        kv_format = self._engines[source].kv_formats.get(service)
        alike = self._engines[target].kv_formats.get(service) == kv_format
        return assigned.call.moves_kv and kv_format is not None and alike

    # Following what engines have

    def _follow(self) -> list[str]:
        """Bring the packer in line with the engines; returns the requests that none of them has."""
        if not self._settled:
            self._settle()
        changed = [name for name in self._packing.groups if self._seen.get(name) != self._present(name)]
        items = self._packing.items
        for name in changed:
            load = self._load(name)
            for id, assigned in load.assigned.items():
                item = items.get(id)
                if item is None or not self._has(item.group, id):
                    self._put(id, assigned, load)
        gone = []
        for name in changed:
            self._seen[name] = self._present(name)
            for id in list(self._packing.groups[name].items):
                if not self._has(name, id):
                    holder = next((other for other in self._packing.groups if self._has(other, id)), None)
                    if holder is None:
                        gone.append(id)
                    else:
                        self._put(id, self._load(holder).assigned[id], self._load(holder))
        return gone

    def _settle(self) -> None:
        """Have a group for each engine that takes requests, as it is now."""
        self._settled = True
        packing = self._packing
        opened = {
            name: DeviceGroup(
                name=name,
                capacity=engine.kv_bytes or _UNLIMITED_BYTES,
                services=frozenset(service for service in engine.residences if engine.serves(service)),
                host=engine.host or name,
            )
            for name, engine in self._engines.items()
            if engine.takes_requests and engine.reserved is None
        }
        for name, occupancy in list(packing.groups.items()):
            if opened.get(name) != occupancy.group:
                packing.close(name)
                self._seen.pop(name, None)
        self._token_bytes.clear()
        self._most_bytes.clear()
        self._block_size = max((self._engines[name].block_size for name in opened), default=1)
        for name, group in opened.items():
            if name not in packing.groups:
                packing.open(group)
            for service in group.services or ():
                tokens = self._engines[name].kv_tokens.get(service)
                token_bytes = group.capacity / tokens if tokens else 1.0
                self._token_bytes[service] = max(token_bytes, self._token_bytes.get(service, 0.0))
                self._most_bytes[service] = max(group.capacity, self._most_bytes.get(service, 0))

    def _put(self, id: str, assigned: Assigned, load: EngineLoad) -> None:
        """A request is on an engine, whatever the packer thought."""
        if id in self._packing.items:
            self._packing.leave(id)
        size = self._size(id, assigned, load)
        self._packer.admit(Arrival(id, assigned.call.service, size.size, size.expected), load.name)

    def _load(self, name: str) -> EngineLoad:
        return self._engines[name].load

    def _present(self, name: str) -> tuple[EngineLoad, int]:
        load = self._load(name)
        return load, load.changes

    def _has(self, name: str | None, id: str) -> bool:
        return name is not None and id in self._engines[name].load.assigned

    # Sizes

    def _size(
        self, id: str, assigned: Assigned, load: EngineLoad, before: Mapping[str, int] | None = None
    ) -> Growth:
        """What a request will have soon, and what it is expected to grow to.

        before: its output an epoch ago; where that is not known, it generates as fast as alone.
        """
        call = assigned.call
        most, made = call.most_tokens * call.choices, self._output.get(id, 0)
        if before is not None and id in before:
            pace: float = made - before[id]
        else:
            pace = call.choices * self._epoch_s / max(load.speed(call.service).decode_s, 1e-6)
        soon = min(most, made + math.ceil(AHEAD_EPOCHS * pace))
        expected = max(soon, assigned.tokens * call.choices)
        return Growth(
            self._bytes(call.service, call.prompt_tokens + soon),
            self._bytes(call.service, call.prompt_tokens + expected),
        )

    def _bytes(self, service: str, tokens: int) -> int:
        whole_blocks = -(-tokens // self._block_size) * self._block_size
        # What is larger than every engine would never be placed; an engine can compute it piece by piece.
        return min(math.ceil(whole_blocks * self._token_bytes[service]), self._most_bytes[service])


def _growth(occupancy: Occupancy, operations: Operations) -> int:
    """How many bytes more the requests of a group have after the operations."""
    items, updates = occupancy.items, operations.updates
    return sum(updates[id].size - item.size for id, item in items.items() if id in updates) if updates else 0
