"""Reads the ``devices`` and ``placement`` of engines: device and size of each, and which services it has."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.config.sections import Rules, Section, section_of
from shoal.config.setting_tree import Node, Scalar, Table, place_of, problem
from shoal.config.value_kinds import Maybe, ScalarKind, Several, Text, as_table, hint, integer, size
from shoal.core import ConfigError

Placement = Mapping[str, tuple[str, ...]]
"""Engine names by service; services that are not in it are on every engine."""

# Names are parts of file names, metrics and URL paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDevice:
    """The device of an engine, and options in which it differs from the other engines."""

    device: str
    """``cpu`` or ``cuda:N``."""
    name: str = ""
    """The engine's name; "": its index."""
    threads: int | None = None
    """CPU threads; None: as configured for all engines."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool; None: as configured for all engines."""
    weights_memory_bytes: int | None = None
    """Limit on the bytes of weights; None: as configured for all engines."""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"an engine's name has up to 32 letters, digits, '.', '_' or '-' and begins with a letter or "
                f"digit, got {self.name!r}"
            )


class DeviceName(ScalarKind):
    """``cpu``, ``cuda`` or ``cuda:N``."""

    label = "`cpu` or `cuda:N`"
    expected = "cpu or cuda:0"

    def parse(self, text: str) -> str:
        """The device, with its number if it is a GPU."""
        if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
            raise ValueError(f"expected {self.expected}, got {text!r}")
        return "cuda:0" if text == "cuda" else text


@dataclass(frozen=True, slots=True)
class DeviceSection(Section):
    """Reads the device of an engine, which alone may be written as plain text."""

    def read(self, node: Node, path: str) -> EngineDevice:
        if isinstance(node, Scalar) and node.text is not None:
            return EngineDevice(device=DeviceName().read(node, path))
        return self.build(self.read_fields(node, path), node, path)  # type: ignore[no-any-return]


def device_section() -> DeviceSection:
    rules: Rules = {
        (EngineDevice, "device"): DeviceName(),
        (EngineDevice, "threads"): Maybe(integer(1)),
        (EngineDevice, "kv_memory_bytes"): Maybe(size()),
        (EngineDevice, "weights_memory_bytes"): Maybe(size()),
    }
    keys = section_of(EngineDevice, rules).keys
    shown = tuple(replace(key, default="its number") if key.name == "name" else key for key in keys)
    return DeviceSection(EngineDevice, shown)


def read_added_engine(settings: Table) -> tuple[EngineDevice, tuple[str, ...] | None]:
    """The device of an additional engine, and the services in its key ``services``; None: all."""
    entries = dict(settings.entries)
    services = entries.pop("services", None)
    node = Table(entries, settings.where, settings.key_places)
    device = device_section().read(node, "")
    return device, None if services is None else Maybe(Several(Text())).read(services, "services")


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
