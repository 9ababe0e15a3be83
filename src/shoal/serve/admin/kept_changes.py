"""Operators' changes that outlast the server: services and engines, standby, drains, placements, pins."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shoal.config.setting_tree import Table, plain_of
from shoal.core import ConfigError, Service

_log = logging.getLogger(__name__)
VERSION = 1
T = TypeVar("T")
Leave = Literal["drained", "standby"]
_IN_WORDS = {"drained": "drained", "standby": "on standby"}


class AddedService(msgspec.Struct, frozen=True, tag="service"):
    service: Service
    engines: tuple[str, ...] | None
    """None: all."""

    @property
    def name(self) -> str:
        return self.service.name


class AddedEngine(msgspec.Struct, frozen=True, tag="engine"):
    name: str
    settings: dict[str, Any]
    """As in the request that added it."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the configuration."""

    version: int = VERSION
    added: tuple[AddedService | AddedEngine, ...] = ()
    """What was added, in order."""
    removed_services: tuple[str, ...] = ()
    """Services of the configuration that were removed."""
    removed_engines: tuple[str, ...] = ()
    """Engines of the configuration that were removed."""
    left: dict[str, Leave] = {}
    """Engines that are drained or on standby."""
    placements: dict[str, tuple[str, ...]] = {}
    """By service: the engines that an operator chose for it."""
    pins: dict[str, bool] = {}
    """Services that were pinned or unpinned."""

    def in_words(self) -> list[str]:
        """One line for each change."""
        words = [
            f"{'service' if isinstance(each, AddedService) else 'engine'} {each.name} was added"
            for each in self.added
        ]
        words += [f"service {name} was removed" for name in self.removed_services]
        words += [f"engine {name} was removed" for name in self.removed_engines]
        words += [f"engine {name} is {_IN_WORDS[how]}" for name, how in self.left.items()]
        words += [f"service {name} is on engine {', '.join(own)}" for name, own in self.placements.items()]
        return words + [f"service {name} is {'' if on else 'not '}pinned" for name, on in self.pins.items()]


@dataclass(slots=True)
class KeptChanges:
    """The changes, in a file of the cluster; without a file nothing outlasts the server.

    The file is replaced at each change, so that it is whole at any moment.
    """

    file: Path | None
    now: Changes
    """All changes since the configuration was the whole truth."""

    @classmethod
    def of(cls, cluster: str | None) -> "KeptChanges":
        """Those of a cluster with this name; None: it has none, and keeps nothing.

        Raises ConfigError for a file that cannot be read.
        """
        if cluster is None:
            return cls(None, Changes())
        file = state_dir() / f"{cluster}.json"
        try:
            now = msgspec.json.decode(file.read_bytes(), type=Changes)
        except FileNotFoundError:
            return cls(file, Changes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: the changes of cluster {cluster!r} that operators made cannot be read ({error}); "
                "repair the file, or delete it to begin with the configuration alone"
            ) from error
        if now.version != VERSION:
            raise ConfigError(
                f"{file}: it is of version {now.version}, and this server reads {VERSION}; delete it to "
                "begin with the configuration alone"
            )
        return cls(file, now)

    def service_added(self, service: Service, engines: Sequence[str] | None) -> None:
        own = AddedService(service, None if engines is None else tuple(engines))
        self._add(own)

    def service_removed(self, name: str) -> None:
        """A service of the configuration stays away; one that was added is forgotten."""
        left, known = self._without_added(AddedService, name)
        self._change(
            added=tuple(_without_service(each, name) for each in left),
            removed_services=_with(self.now.removed_services, None if known else name),
            placements=_without(self.now.placements, name),
            pins=_without(self.now.pins, name),
        )

    def engine_added(self, name: str, settings: Table) -> None:
        self._add(AddedEngine(name, {**plain_of(settings), "name": name}))

    def engine_removed(self, name: str) -> None:
        """An engine of the configuration stays away; one that was added is forgotten."""
        left, known = self._without_added(AddedEngine, name)
        self._change(
            added=tuple(_without_named_engine(each, name) for each in left),
            removed_engines=_with(self.now.removed_engines, None if known else name),
            left=_without(self.now.left, name),
            placements=_without_engine(self.now.placements, name),
        )

    def engine_left(self, name: str, how: Leave | None) -> None:
        """An engine is drained or on standby; None: it takes requests again."""
        left = _without(self.now.left, name)
        self._change(left=left if how is None else {**left, name: how})

    def service_placed(self, service: str, engines: Sequence[str]) -> None:
        self._change(placements={**self.now.placements, service: tuple(engines)})

    def forget_unknown(self, services: Collection[str], engines: Collection[str]) -> None:
        """Forget changes of what the configuration does not have any more, and nobody added.

        services, engines: names in the configuration.
        """
        own_services = {*services, *(each.name for each in self.now.added if isinstance(each, AddedService))}
        own_engines = {*engines, *(each.name for each in self.now.added if isinstance(each, AddedEngine))}
        now = msgspec.structs.replace(
            self.now,
            removed_services=tuple(name for name in self.now.removed_services if name in own_services),
            removed_engines=tuple(name for name in self.now.removed_engines if name in own_engines),
            left={name: how for name, how in self.now.left.items() if name in own_engines},
            placements={name: own for name, own in self.now.placements.items() if name in own_services},
            pins={name: pinned for name, pinned in self.now.pins.items() if name in own_services},
        )
        if now != self.now:
            self._change(**{field: getattr(now, field) for field in now.__struct_fields__})

    def service_pinned(self, name: str, pinned: bool) -> None:
        self._change(pins={**self.now.pins, name: pinned})

    def _add(self, own: AddedService | AddedEngine) -> None:
        """Add a service or an engine, or replace what is known of it."""
        added = list(self.now.added)
        for at, each in enumerate(added):
            if type(each) is type(own) and each.name == own.name:
                added[at] = own
                break
        else:
            added.append(own)
        self._change(added=tuple(added))

    def _without_added(self, kind: type, name: str) -> tuple[tuple[AddedService | AddedEngine, ...], bool]:
        """What was added but this, and whether this was."""
        left = tuple(each for each in self.now.added if not (isinstance(each, kind) and each.name == name))
        return left, len(left) < len(self.now.added)

    def _change(self, **fields: object) -> None:
        self.now = msgspec.structs.replace(self.now, **fields)
        if self.file is None:
            return
        partial = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.now)))
            partial.replace(self.file)
        except (OSError, TypeError) as error:
            _log.warning("%s: this change is lost when the server ends: %s", self.file, error)


def state_dir() -> Path:
    """Folder for what outlasts a server: ``$SHOAL_STATE``, else ``shoal`` in the user's folder for states
    (``$XDG_STATE_HOME`` or ``~/.local/state``)."""
    chosen = os.environ.get("SHOAL_STATE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "shoal"


def _without_service(each: AddedService | AddedEngine, service: str) -> AddedService | AddedEngine:
    """What was added, without a service that is gone; an engine of it alone gets all."""
    if isinstance(each, AddedService) or service not in (each.settings.get("services") or ()):
        return each
    services = [name for name in each.settings["services"] if name != service]
    return msgspec.structs.replace(each, settings={**each.settings, "services": services or None})


def _without_named_engine(each: AddedService | AddedEngine, engine: str) -> AddedService | AddedEngine:
    """What was added, without an engine that is gone; a service of it alone goes to all."""
    if isinstance(each, AddedEngine) or engine not in (each.engines or ()):
        return each
    assert each.engines is not None
    engines = tuple(name for name in each.engines if name != engine)
    return msgspec.structs.replace(each, engines=engines or None)


def _with(names: tuple[str, ...], name: str | None) -> tuple[str, ...]:
    return names if name is None or name in names else (*names, name)


def _without(entries: dict[str, T], name: str) -> dict[str, T]:
    return {key: value for key, value in entries.items() if key != name}


def _without_engine(entries: dict[str, tuple[str, ...]], engine: str) -> dict[str, tuple[str, ...]]:
    left = {
        service: tuple(each for each in engines if each != engine) for service, engines in entries.items()
    }
    return {service: engines for service, engines in left.items() if engines}
