"""Engine choice by a packer (Mell and others): feeds it the requests of all engines and their KV sizes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.cluster.manager.engine_load import AssignedRequest, EngineLoad, UnassignedRequest
from shoal.cluster.manager.state import Engine
from shoal.cluster.packing import Arrival, Changes, DeviceGroup, Growth, Operations, Packer

STAYS_EPOCHS = 5
"""Epochs in which a migrated request does not migrate again."""
AHEAD_EPOCHS = 1.25
"""How far ahead requests are sized: an epoch, and the time that migrations take after it."""
_UNLIMITED_BYTES = 1 << 60
"""Capacity of an engine whose memory is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMigration:
    """A migration that the packer wants."""

    request: str
    source: str
    """The engine that has it."""
    target: str
    kv_bytes: int
    """Its KV now."""
    tokens: int
    """Its length now, prompt and output."""
    relieves: bool
    """Whether the source is over its memory."""


class PackerChooser:
    """Lets a packer decide about the requests of all engines that accept requests.

    The engines' loads are the truth, whatever happened to requests (an engine died, a migration was not
    made). Before each decision the packer's state is synchronized with them, its own earlier decisions
    included. Sizes are bytes of KV, ``AHEAD_EPOCHS`` ahead.
    """

    def __init__(self, packer: Packer, engines: Mapping[str, Engine], epoch_s: float) -> None:
        self._packer = packer
        self._packing = packer.packing
        self._engines = engines
        self._epoch_s = epoch_s
        self._epochs = 0
        self._groups_current = False
        # Load of each engine, and its change count, when the packer was last synchronized.
        self._synchronized: dict[str, tuple[EngineLoad, int]] = {}
        # By service: bytes of a token's KV, and the largest memory of an engine for it.
        self._token_bytes: dict[str, float] = {}
        self._block_size = 1
        self._most_bytes: dict[str, int] = {}
        self._output: Mapping[str, int] = {}
        # Epochs in which requests migrated.
        self._migrated: dict[str, int] = {}
        self._wanted: dict[str, PlannedMigration] = {}
        self._preempted: dict[str, None] = {}

    def engines_changed(self) -> None:
        self._groups_current = False

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """The packer's choice if it is one of ``engines``; None: there is no room."""
        gone = self._synchronize()
        call = unassigned.call
        size = self._size(
            call.request,
            AssignedRequest(call, unassigned.tokens, 0, 0, unassigned.now_ns, unassigned.turn),
            engines[0],
        )
        arrival = Arrival(call.request, call.service, size.size, size.expected)
        changes = self._apply(Operations(departures=gone, arrivals=[arrival]))
        group = changes.placed.get(call.request)
        if group is not None and any(load.name == group for load in engines):
            return self._engines[group].load
        self._mark_stale(*changes.placed.values())
        # Packers know neither which engines are kept for other requests nor the largest length of a request.
        return None if group is None else self._fullest(unassigned, engines)

    def choose_target(
        self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]
    ) -> EngineLoad | None:
        """The only one of ``engines``, or the fullest that has room for a migrating request."""
        return engines[0] if len(engines) == 1 else self._fullest(unassigned, engines)

    def _fullest(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """Put the request on the fullest engine with room for it."""
        gone = self._synchronize()
        if gone:
            self._apply(Operations(departures=gone))
        id, groups = unassigned.call.request, self._packing.groups
        assigned = AssignedRequest(
            unassigned.call, unassigned.tokens, 0, 0, unassigned.now_ns, unassigned.turn
        )
        size = self._size(id, assigned, engines[0]).size
        fitting = [load for load in engines if size <= groups[load.name].idle]
        chosen = min(fitting, key=lambda load: groups[load.name].idle, default=None)
        if chosen is not None:
            self._put(id, assigned, chosen)
        return chosen

    def begin_epoch(self, output_tokens: Mapping[str, int]) -> None:
        """Resize all requests; output_tokens: by request, now."""
        gone = self._synchronize()
        if not self._packing.groups:
            return
        self._epochs += 1
        self._migrated = {id: epoch for id, epoch in self._migrated.items() if id in self._packing.items}
        ended, before, self._output = set(gone), self._output, output_tokens
        updates = {}
        for name, occupancy in self._packing.groups.items():
            load = self._engines[name].load
            for item in occupancy.items.values():
                if item.id not in ended:
                    size = self._size(item.id, load.assigned[item.id], load, before)
                    updates[item.id] = replace(size, stays=self._stays(item.id))
        self._apply(Operations(departures=gone, updates=updates))

    def take_wanted(self) -> list[PlannedMigration]:
        """Migrations that the packer decided on since the last call, one for each request."""
        wanted, self._wanted = self._wanted, {}
        return list(wanted.values())

    def take_preempted(self) -> list[str]:
        """Requests that the packer preempted since the last call."""
        preempted, self._preempted = self._preempted, {}
        return list(preempted)

    def migration_started(self, request: str) -> None:
        """A wanted migration has begun."""
        self._migrated[request] = self._epochs

    def _stays(self, id: str) -> bool:
        """Whether a request migrated recently."""
        return self._epochs - self._migrated.get(id, -STAYS_EPOCHS) < STAYS_EPOCHS

    def _apply(self, operations: Operations) -> Changes:
        changes = self._packer.apply(operations)
        for migration in changes.migrations:
            self._mark_stale(migration.source, migration.target)
            if self._stays(migration.id):
                continue
            assigned = self._engines[migration.source].load.assigned[migration.id]
            tokens = assigned.call.prompt_tokens + self._output.get(migration.id, 0)
            self._wanted[migration.id] = PlannedMigration(
                request=migration.id,
                source=migration.source,
                target=migration.target,
                kv_bytes=self._bytes(assigned.call.service, tokens),
                tokens=tokens,
                relieves=migration.source in changes.relieved,
            )
        for id in changes.preempted:
            holder = self._holder(id)
            if holder is not None:
                self._mark_stale(holder)
            self._preempted[id] = None
        return changes

    # Synchronization with the engines

    def _mark_stale(self, *engines: str) -> None:
        """Synchronize these engines again: a decision about them may never be executed."""
        for engine in engines:
            self._synchronized.pop(engine, None)

    def _synchronize(self) -> list[str]:
        """Synchronize the packer with the engines; returns the requests that no engine has."""
        if not self._groups_current:
            self._update_groups()
        groups, items = self._packing.groups, self._packing.items
        changed = [name for name in groups if self._synchronized.get(name) != self._version(name)]
        misplaced: dict[str, None] = {}
        for name in changed:
            self._synchronized[name] = self._version(name)
            assigned = self._load(name).assigned
            for id in assigned:
                item = items.get(id)
                if item is None or item.group != name:
                    misplaced[id] = None
            misplaced.update((id, None) for id in groups[name].items if id not in assigned)
        gone = []
        for id in misplaced:
            holder = self._holder(id)
            if holder is None:
                gone.append(id)
            elif id not in items or items[id].group != holder:
                self._put(id, self._load(holder).assigned[id], self._load(holder))
        return gone

    def _holder(self, id: str) -> str | None:
        """The engine of a request; of two, the one that it was sent to last."""
        holders = [name for name in self._packing.groups if id in self._load(name).assigned]
        return max(holders, key=lambda name: self._load(name).assigned[id].turn, default=None)

    def _update_groups(self) -> None:
        """Make the groups match the open engines."""
        self._groups_current = True
        packing = self._packing
        opened = {
            name: DeviceGroup(
                name=name,
                capacity=engine.kv_bytes or _UNLIMITED_BYTES,
                services=frozenset(_services(engine)),
                host=engine.host or name,
            )
            for name, engine in self._engines.items()
            if engine.accepts_requests and engine.reserved is None
        }
        for name, occupancy in list(packing.groups.items()):
            if opened.get(name) != occupancy.group:
                packing.close(name)
                self._synchronized.pop(name, None)
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

    def _put(self, id: str, assigned: AssignedRequest, load: EngineLoad) -> None:
        """Put a request on an engine, wherever the packer had it."""
        if id in self._packing.items:
            self._packing.leave(id)
        size = self._size(id, assigned, load)
        self._packer.admit(Arrival(id, assigned.call.service, size.size, size.expected), load.name)

    def _load(self, name: str) -> EngineLoad:
        return self._engines[name].load

    def _version(self, name: str) -> tuple[EngineLoad, int]:
        load = self._load(name)
        return load, load.changes

    # Sizes

    def _size(
        self, id: str, assigned: AssignedRequest, load: EngineLoad, before: Mapping[str, int] | None = None
    ) -> Growth:
        """KV of a request in the near future, and at its expected end.

        before: output an epoch ago, by request; if unknown, the request generates as fast as alone.
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
        # A larger request would never be placed, though an engine can compute it piece by piece.
        return min(math.ceil(whole_blocks * self._token_bytes[service]), self._most_bytes[service])


def _services(engine: Engine) -> Iterator[str]:
    """Services that it has loaded, or has requests of."""
    yield from (service for service in engine.residences if engine.serves(service))
    yield from (assigned.call.service for assigned in engine.load.assigned.values())
