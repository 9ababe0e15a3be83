"""Device catalogues: kinds of devices with price, count, memory and step times, read from YAML."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.config.scenario_latency import DeviceName, latency_kind
from shoal.config.sections import Section, section_of
from shoal.config.setting_tree import Node, place_of, problem, read_yaml
from shoal.config.value_kinds import Choice, Kind, Maybe, Several, integer, number, size
from shoal.core import ConfigError
from shoal.forecast.device_specs import DEVICE_SPECS, DeviceSpec, find_device_spec
from shoal.forecast.latency_sources import Latency, RooflineLatency, RooflineOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,23}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    name: str
    price: float = 1.0
    """Of one device, in a currency and period that are the same for all kinds."""
    device: DeviceSpec | None = None
    """Data sheet; None: the one known by ``name``, if any."""
    memory_bytes: int | None = None
    """Memory of one device; None: that of the data sheet."""
    latency: Latency | None = None
    """Source of step times; None: the data sheet."""
    most: int = 8
    """Number of available devices."""
    span: int = 1
    """Devices of a host that one engine may span (tensor parallelism)."""
    threads: int | None = None
    """CPU threads of an engine, for CPUs; None: the server divides its cores."""
    engine: Literal["cpu", "cuda"] | None = None
    """Type of the device for servers; None: from the data sheet."""

    def __post_init__(self) -> None:
        """Look up the data sheet; raises ConfigError for unknown memory or step times."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "the name of a kind has up to 24 letters, digits, '.', '_' or '-' and begins with a letter "
                f"or digit, since engines are named after it; got {self.name!r}"
            )
        sheet = self.device or find_device_spec(self.name)
        object.__setattr__(self, "device", sheet)
        if self.engine is None and sheet is not None:
            object.__setattr__(self, "engine", "cpu" if sheet.name == "cpu" else "cuda")
        if sheet is None and (self.memory_bytes is None or self.latency is None):
            raise ConfigError(
                f"no data sheet of {self.name!r} is on record; write memory and latency, or device, one of "
                f"{', '.join(DEVICE_SPECS)}"
            )

    @property
    def memory(self) -> int:
        """Memory of one device, in bytes."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        assert self.device is not None
        return self.device.memory_bytes

    def latency_over(self, tp: int) -> Latency:
        """Source of step times of an engine over ``tp`` devices."""
        if self.latency is None:
            assert self.device is not None
            return RooflineLatency(roofline=RooflineOptions(device=self.device, tp=tp))
        if isinstance(self.latency, RooflineLatency):
            return RooflineLatency(roofline=replace(self.latency.roofline, tp=tp))
        return replace(self.latency, tp=tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All available kinds of devices, with unique names."""

    devices: tuple[DeviceKind, ...]
    currency: str = "$/h"
    """Unit of prices."""


@dataclass(frozen=True, slots=True)
class CatalogueSection(Section):
    """The schema of a catalogue file."""

    def read(self, node: Node, path: str) -> Catalogue:
        catalogue: Catalogue = self.build(self.read_fields(node, path), node, path)
        names = [kind.name for kind in catalogue.devices]
        if not names:
            raise problem(place_of(node, "devices"), "devices", "name at least one kind of device")
        for at, name in enumerate(names):
            if name in names[:at]:
                where = place_of(node, "devices", at)
                raise problem(where, f"devices[{at}].name", f"there is already a kind named {name!r}")
        return catalogue


def catalogue_section(folder: Path = Path()) -> CatalogueSection:
    """The schema of a catalogue; relative paths start at ``folder``."""
    rules: dict[tuple[type, str], Kind] = {
        (DeviceKind, "price"): number(above=0),
        (DeviceKind, "device"): Maybe(DeviceName()),
        (DeviceKind, "memory_bytes"): Maybe(size()),
        (DeviceKind, "latency"): Maybe(latency_kind(folder)),
        (DeviceKind, "most"): integer(1, 256),
        (DeviceKind, "span"): integer(1, 64),
        (DeviceKind, "threads"): Maybe(integer(1)),
        (DeviceKind, "engine"): Maybe(Choice(("cpu", "cuda"))),
    }
    rules[Catalogue, "devices"] = Several(section_of(DeviceKind, rules))
    return CatalogueSection(Catalogue, section_of(Catalogue, rules).keys)


def load_catalogue(file: Path) -> Catalogue:
    """The catalogue in a YAML file; raises ConfigError for the first mistake."""
    catalogue: Catalogue = catalogue_section(file.parent).read(read_yaml(file), "")
    return catalogue
