"""Reads ``devices`` and ``placement`` of engines: device, size and step times of each, and its services."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.engine_latency import EngineLatencyKind
from shoal.config.sections import Rules, Section, section_of
from shoal.config.setting_tree import Node, Scalar, Table, place_of, problem
from shoal.config.value_kinds import Maybe, ScalarKind, Several, Text, as_table, hint, integer, size
from shoal.core import ConfigError
from shoal.engine.options import SIMULATED
from shoal.forecast.latency_sources import EngineLatency

Placement = Mapping[str, tuple[str, ...]]
"""Engine names by service; services that are not in it are on every engine."""

# Names are parts of file names, metrics and URL paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDevice:
    """The device of an engine, and options in which it differs from the other engines."""

    device: str
    """``cpu``, ``cuda:N`` or ``simulated``."""
    name: str = ""
    """The engine's name; "": its index."""
    threads: int | None = None
    """CPU threads; None: as configured for all engines."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool; None: as configured for all engines."""
    weights_memory_bytes: int | None = None
    """Limit on the bytes of weights; None: as configured for all engines."""
    latency: EngineLatency | None = None
    """Step times of a simulated engine; None: as configured for all engines."""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"an engine's name has up to 32 letters, digits, '.', '_' or '-' and begins with a letter or "
                f"digit, got {self.name!r}"
            )
        if self.latency is not None and not self.simulated:
            raise ConfigError(f"latency is of simulated devices only, and device is {self.device}")

    @property
    def simulated(self) -> bool:
        """Whether its steps take time and compute nothing."""
        return self.device == SIMULATED


class DeviceName(ScalarKind):
    """``cpu``, ``cuda``, ``cuda:N``, ``simulated``, or ``simulated:`` with the latency."""

    label = "`cpu`, `cuda:N` or `simulated`"
    expected = "cpu, cuda:0 or simulated"

    def parse(self, text: str) -> str:
        """The device, with its number if it is a GPU, or with the latency that is written behind it."""
        if not re.fullmatch(rf"cpu|cuda(:\d+)?|{SIMULATED}(:.+)?", text):
            raise ValueError(f"expected {self.expected}, got {text!r}")
        return "cuda:0" if text == "cuda" else text


@dataclass(frozen=True, slots=True)
class DeviceSection(Section):
    """Reads the device of an engine, which alone may be written as plain text."""

    def read(self, node: Node, path: str) -> EngineDevice:
        if isinstance(node, Scalar) and node.text is not None:
            fields = {"device": DeviceName().read(node, path)}
        else:
            fields = self.read_fields(node, path)
        return self.build(self._with_latency(fields, node, path), node, path)  # type: ignore[no-any-return]

    def _with_latency(self, fields: dict[str, Any], node: Node, path: str) -> dict[str, Any]:
        """The fields with a latency that is written behind the device's name."""
        _, _, latency = fields["device"].partition(f"{SIMULATED}:")
        if not latency:
            return fields
        where = node.where if isinstance(node, Scalar) else place_of(node, "device")
        if fields.get("latency") is not None:
            raise problem(where, path, f"the latency is written twice: here, and in {SIMULATED}:{latency}")
        kind = next(key.kind for key in self.keys if key.field == "latency")
        return {**fields, "device": SIMULATED, "latency": kind.read(Scalar(latency, where), path)}


def device_section(folder: Path | None) -> DeviceSection:
    """The keys of an engine.

    folder: base of relative paths; None: no files are read.
    """
    rules: Rules = {
        (EngineDevice, "device"): DeviceName(),
        (EngineDevice, "threads"): Maybe(integer(1)),
        (EngineDevice, "kv_memory_bytes"): Maybe(size()),
        (EngineDevice, "weights_memory_bytes"): Maybe(size()),
        (EngineDevice, "latency"): Maybe(EngineLatencyKind(folder)),
    }
    keys = section_of(EngineDevice, rules).keys
    shown = tuple(replace(key, default="its number") if key.name == "name" else key for key in keys)
    return DeviceSection(EngineDevice, shown)


def read_added_engine(settings: Table) -> tuple[EngineDevice, tuple[str, ...] | None]:
    """The device of an additional engine, and the services in its key ``services``; None: all."""
    entries = dict(settings.entries)
    services = entries.pop("services", None)
    node = Table(entries, settings.where, settings.key_places)
    device = device_section(None).read(node, "")
    return device, None if services is None else Maybe(Several(Text())).read(services, "services")


def read_placed_service(settings: Table) -> tuple[str, tuple[str, ...]]:
    """A service, in the key ``service``, and its engines, in ``engines``."""
    keys = ("service", "engines")
    for key in settings.entries:
        if key not in keys:
            raise problem(place_of(settings, key), key, f"unknown key; known are {' and '.join(keys)}")
    for key in keys:
        if key not in settings.entries:
            raise problem(settings.where, key, "must be given")
    service = Text().read(settings.entries["service"], "service")
    return service, Several(Text()).read(settings.entries["engines"], "engines")


@dataclass(frozen=True, slots=True)
class PlacementKind:
    """Reads lists of engines by service."""

    label: str = "lists of engines by service"

    def read(self, node: Node, path: str) -> Placement:
        engines = Several(Text())
        entries = as_table(node, path).entries
        return {service: engines.read(value, f"{path}.{service}") for service, value in entries.items()}

    def show(self, value: Placement) -> str:
        shown = (f"{service}: [{', '.join(engines)}]" for service, engines in value.items())
        return "{" + ", ".join(shown) + "}"


def named_devices(devices: Sequence[EngineDevice], table: Table) -> tuple[EngineDevice, ...]:
    """The devices, each with a name; raises ConfigError if there are none, or for duplicate names.

    table: the whole configuration, for the places in errors.
    """
    if not devices:
        raise problem(place_of(table, "devices"), "devices", "name at least one device: cpu or cuda:0")
    named = tuple(replace(device, name=device.name or str(index)) for index, device in enumerate(devices))
    for index, device in enumerate(named):
        if device.name in {earlier.name for earlier in named[:index]}:
            where = place_of(table, "devices", index, "name")
            raise problem(
                where, f"devices[{index}].name", f"there is already an engine named {device.name!r}"
            )
    return named


def check_simulated(
    devices: Sequence[EngineDevice], latency: EngineLatency | None, services: Sequence[str], table: Table
) -> None:
    """Raise ConfigError for simulated devices beside others, and for a latency of none of them or of unknown
    services.

    latency: of all simulated engines. table: the whole configuration, for the places in errors.
    """
    simulated = [device for device in devices if device.simulated]
    if simulated and len(simulated) < len(devices):
        raise problem(
            place_of(table, "devices"),
            "devices",
            "simulated engines make up their tokens, so they cannot be beside others; make all simulated",
        )
    if latency is not None and not simulated:
        what = "is of simulated engines, and there is none; write devices: [simulated] (--device simulated)"
        raise problem(place_of(table, "latency"), "latency", what)
    _check_timed(latency, services, place_of(table, "latency"), "latency")
    for index, device in enumerate(devices):
        where = place_of(table, "devices", index, "latency")
        _check_timed(device.latency, services, where, f"devices[{index}].latency")


def _check_timed(latency: EngineLatency | None, services: Sequence[str], where: str, path: str) -> None:
    """Raise ConfigError for step times of an unknown service."""
    for service in () if latency is None else latency.services:
        if service not in services:
            what = f"there is no such service{_possible_names(service, services)}"
            raise problem(where, f"{path}.services.{service}", what)


def check_placement(
    placement: Placement, services: Sequence[str], engines: Sequence[str], table: Table
) -> None:
    """Raise ConfigError for unknown services or engines, and for engines without a service.

    table: the whole configuration, for the places in errors.
    """
    for service, chosen in placement.items():
        where, path = place_of(table, "placement", service), f"placement.{service}"
        if service not in services:
            raise problem(where, path, f"there is no such service{_possible_names(service, services)}")
        if not chosen:
            raise problem(where, path, f"name at least one engine{_possible_names('', engines)}")
        for index, engine in enumerate(chosen):
            if engine not in engines:
                where = place_of(table, "placement", service, index)
                what = f"there is no engine {engine!r}{_possible_names(engine, engines)}"
                raise problem(where, f"{path}[{index}]", what)
            if engine in chosen[:index]:
                raise problem(where, f"{path}[{index}]", f"engine {engine!r} is named twice")
    for engine in engines:
        if not any(engine in placement.get(service, engines) for service in services):
            raise problem(
                place_of(table, "placement"),
                "placement",
                f"engine {engine!r} has no service: name it for one of {', '.join(services)}, "
                "or leave out its device",
            )


def _possible_names(name: str, names: Sequence[str]) -> str:
    return hint(name, names) or f"; possible: {', '.join(names)}"
