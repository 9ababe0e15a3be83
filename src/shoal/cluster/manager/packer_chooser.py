"""Running requests as a packer sees them: which engine has each, how much KV that is, and how it grows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.cluster.manager.engine_load import Assigned, EngineLoad, Newcomer
from shoal.cluster.manager.state import Engine
from shoal.cluster.packing import Arrival, Changes, DeviceGroup, Growth, Operations, Packer

STAYS_EPOCHS = 5
"""A request that was moved is not moved again in so many epochs."""
AHEAD_EPOCHS = 1.25
"""Requests are as large as they will be so much later: in an epoch, and the time that moves take then."""
_UNLIMITED_BYTES = 1 << 60
"""Memory of an engine that did not say how much it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMove:
    """A running request that the packer wants elsewhere."""

    request: str
    """Its id."""
    source: str
    """The engine that has it."""
    target: str
    """The engine that is to have it."""
    kv_bytes: int
    """How much KV it has."""
    tokens: int
    """How many tokens that are."""
    relieves: bool
    """Whether the source lacks memory for what it runs."""


class PackedCalls:
    """Lets a packer decide about the requests of all engines that take requests.

    What engines have follows from their loads, whatever else happened to requests (an engine died, a move was
    not made): the packer's books are brought in line with that before each decision, and what it decided
    itself is no exception. Sizes are bytes of KV, ``AHEAD_EPOCHS`` later.
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
        self._wanted: dict[str, PackedMove] = {}
        self._preempted: dict[str, None] = {}

    def engines_changed(self) -> None:
        """Other engines take requests, or of other services."""
        self._settled = False

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """Where the packer puts a request, if that is one of ``engines``; None: there is no room."""
        gone = self._follow()
        call = newcomer.call
        size = self._size(
            call.request, Assigned(call, newcomer.tokens, 0, 0, newcomer.now_ns, newcomer.turn), engines[0]
        )
        arrival = Arrival(call.request, call.service, size.size, size.expected)
        changes = self._apply(Operations(departures=gone, arrivals=[arrival]))
        group = changes.placed.get(call.request)
        if group is not None and any(load.name == group for load in engines):
            return self._engines[group].load
        self._unsure(*changes.placed.values())
        # Packers know neither who is left to others nor how large a request may become at most.
        return None if group is None else self._fullest(newcomer, engines)

    def choose_target(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """The only one of ``engines``, or the fullest that has room for a request that leaves its own."""
        return engines[0] if len(engines) == 1 else self._fullest(newcomer, engines)

    def _fullest(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """The engine that has least room left, of those that have enough; it has the request from now on."""
        gone = self._follow()
        if gone:
            self._apply(Operations(departures=gone))
        id, groups = newcomer.call.request, self._packing.groups
        assigned = Assigned(newcomer.call, newcomer.tokens, 0, 0, newcomer.now_ns, newcomer.turn)
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
                    size = self._size(item.id, load.assigned[item.id], load, before)
                    updates[item.id] = replace(size, stays=self._stays(item.id))
        self._apply(Operations(departures=gone, updates=updates))

    def take_wanted(self) -> list[PackedMove]:
        """Moves that the packer decided on since this was asked last, one for each request."""
        wanted, self._wanted = self._wanted, {}
        return list(wanted.values())

    def take_preempted(self) -> list[str]:
        """Requests that the packer has no room for any more, since this was asked last."""
        preempted, self._preempted = self._preempted, {}
        return list(preempted)

    def moved(self, request: str) -> None:
        """A move that was wanted has begun."""
        self._moved[request] = self._epochs

    def _stays(self, id: str) -> bool:
        """Whether a request was moved lately."""
        return self._epochs - self._moved.get(id, -STAYS_EPOCHS) < STAYS_EPOCHS

    def _apply(self, operations: Operations) -> Changes:
        changes = self._packer.apply(operations)
        for move in changes.migrations:
            self._unsure(move.source, move.target)
            if self._stays(move.id):
                continue
            assigned = self._engines[move.source].load.assigned[move.id]
            tokens = assigned.call.prompt_tokens + self._output.get(move.id, 0)
            self._wanted[move.id] = PackedMove(
                request=move.id,
                source=move.source,
                target=move.target,
                kv_bytes=self._bytes(assigned.call.service, tokens),
                tokens=tokens,
                relieves=move.source in changes.relieved,
            )
        for id in changes.preempted:
            holder = self._holder(id)
            if holder is not None:
                self._unsure(holder)
            self._preempted[id] = None
        return changes

    # Following what engines have

    def _unsure(self, *engines: str) -> None:
        """Something was decided of these engines that is not carried out yet, and perhaps never will be."""
        for engine in engines:
            self._seen.pop(engine, None)

    def _follow(self) -> list[str]:
        """Bring the packer in line with the engines; returns the requests that none of them has."""
        if not self._settled:
            self._settle()
        groups, items = self._packing.groups, self._packing.items
        changed = [name for name in groups if self._seen.get(name) != self._present(name)]
        astray: dict[str, None] = {}
        for name in changed:
            self._seen[name] = self._present(name)
            assigned = self._load(name).assigned
            for id in assigned:
                item = items.get(id)
                if item is None or item.group != name:
                    astray[id] = None
            astray.update((id, None) for id in groups[name].items if id not in assigned)
        gone = []
        for id in astray:
            holder = self._holder(id)
            if holder is None:
                gone.append(id)
            elif id not in items or items[id].group != holder:
                self._put(id, self._load(holder).assigned[id], self._load(holder))
        return gone

    def _holder(self, id: str) -> str | None:
        """The engine that has a request, or is to have it: of two that to which it was sent last."""
        holders = [name for name in self._packing.groups if id in self._load(name).assigned]
        return max(holders, key=lambda name: self._load(name).assigned[id].turn, default=None)

    def _settle(self) -> None:
        """Have a group for each engine that takes requests, as it is now."""
        self._settled = True
        packing = self._packing
        opened = {
            name: DeviceGroup(
                name=name,
                capacity=engine.kv_bytes or _UNLIMITED_BYTES,
                services=frozenset(_services(engine)),
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
                tokens = self._engines[name].load.kv_tokens.get(service)
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


def _services(engine: Engine) -> Iterator[str]:
    """What it serves, or has requests of all the same."""
    yield from (service for service in engine.residences if engine.serves(service))
    yield from (assigned.call.service for assigned in engine.load.assigned.values())
