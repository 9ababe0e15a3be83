"""Reads ``latency`` of scenarios: fitted, profiled or roofline step times, devices, links, host overhead."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.scenario import LARGEST_ENGINES
from shoal.config.scenario_kinds import FilePath, ModelShape
from shoal.config.sections import Section, section_of, unknown_key
from shoal.config.setting_tree import Node, Scalar, problem
from shoal.config.value_kinds import Maybe, Text, as_table, byte_rate, integer, number, seconds
from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec, device_spec
from shoal.forecast.latency_sources import FitLatency, ProfileLatency, RooflineLatency, RooflineOptions
from shoal.forecast.overhead import HostOverhead
from shoal.forecast.roofline_ops import Link


class DeviceName:
    """A device with a known data sheet."""

    label = "device"

    def read(self, node: Node, path: str) -> DeviceSpec:
        text: str = Text().read(node, path)
        try:
            return device_spec(text)
        except ConfigError as error:
            raise problem(node.where, path, str(error)) from None

    def show(self, value: DeviceSpec) -> str:
        """Its name."""
        return value.name


def link_section() -> Section:
    """Link between the devices of one engine, for any number of them."""
    section = section_of(Link, {(Link, "bandwidth"): byte_rate()}, {"start_s": "latency"})
    return Section(Link, tuple(key for key in section.keys if key.name in ("bandwidth", "latency")))


@dataclass(frozen=True, slots=True)
class OverheadSection(Section):
    """Reads the host's overhead; a time alone is the overhead of each step."""

    def read(self, node: Node, path: str) -> HostOverhead:
        if isinstance(node, Scalar):
            return HostOverhead(step_s=seconds().read(node, path))
        overhead: HostOverhead = self.build(self.read_fields(node, path), node, path)
        return overhead


def overhead_section() -> OverheadSection:
    return OverheadSection(HostOverhead, section_of(HostOverhead, {}).keys)


@dataclass(frozen=True, slots=True)
class LatencyKind:
    """The source of step times: the section whose own key is written."""

    sections: Mapping[str, Section]

    @property
    def label(self) -> str:
        """The keys, of which one must be written."""
        return "mapping with " + " or ".join(f"`{name}`" for name in self.sections)

    def read(self, node: Node, path: str) -> Any:
        table = as_table(node, path)
        named = [name for name in self.sections if name in table.entries]
        if len(named) == 1:
            return self.sections[named[0]].read(table, path)
        known = {key.name for section in self.sections.values() for key in section.keys}
        for name, place in table.key_places.items():
            if name not in known:
                raise unknown_key(place, f"{path}.{name}", name, tuple(self.sections))
        got = " and ".join(named) or "none"
        raise problem(node.where, path, f"write one of {', '.join(self.sections)}, got {got}")

    def show(self, value: Any) -> str:
        """The key with its value."""
        return next(section.show(value) for section in self.sections.values() if type(value) is section.cls)


def latency_kind(folder: Path) -> LatencyKind:
    """The three sources of step times; folder: base of relative paths."""
    file, model, device, tp = FilePath(folder), ModelShape(folder), DeviceName(), integer(1)
    link, overhead = Maybe(link_section()), overhead_section()
    roofline = section_of(
        RooflineOptions,
        {
            (RooflineOptions, "model"): Maybe(model),
            (RooflineOptions, "device"): device,
            (RooflineOptions, "tp"): tp,
            (RooflineOptions, "link"): link,
            (RooflineOptions, "overhead"): overhead,
        },
    )
    sections = {
        "fit": section_of(FitLatency, {(FitLatency, "fit"): file, (FitLatency, "tp"): tp}),
        "profile": section_of(
            ProfileLatency,
            {
                (ProfileLatency, "profile"): file,
                (ProfileLatency, "tp"): tp,
                (ProfileLatency, "model"): Maybe(model),
                (ProfileLatency, "device"): Maybe(device),
                (ProfileLatency, "link"): link,
                (ProfileLatency, "overhead"): overhead,
                (ProfileLatency, "data_parallel"): integer(1, LARGEST_ENGINES),
                (ProfileLatency, "expert_imbalance"): number(minimum=1),
            },
        ),
        "roofline": section_of(RooflineLatency, {(RooflineLatency, "roofline"): roofline}),
    }
    return LatencyKind(sections)
