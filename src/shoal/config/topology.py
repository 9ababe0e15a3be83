"""Reads and writes cluster topology files: devices, links, and speeds of devices without a data sheet."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config.sections import Rules, Section, section_of
from shoal.config.setting_tree import Node, Table, parse_yaml, place_of, problem, read_yaml
from shoal.config.value_kinds import Several, as_table, byte_rate, hint
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.core.units import format_byte_rate, format_size
from shoal.place.topology import Topology

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class PairLink:
    """A link of two devices that differs from the default of their hosts."""

    devices: tuple[str, ...]
    bytes_per_s: float
    """As in ``Link``."""
    latency_s: float


@dataclass(frozen=True, slots=True)
class Links:
    host: Link
    """Between devices of one host."""
    network: Link
    """Between devices of two hosts."""
    pairs: tuple[PairLink, ...] = ()
    """Exceptions."""


@dataclass(frozen=True, slots=True)
class TopologyFile:
    devices: tuple[Device, ...]
    links: Links
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second by kind of device."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second by kind of device."""

    label: str = "bytes per second by kind"

    def read(self, node: Node, path: str) -> Mapping[str, float]:
        entries = as_table(node, path).entries
        return {kind: float(byte_rate().read(value, f"{path}.{kind}")) for kind, value in entries.items()}

    def show(self, value: Mapping[str, float]) -> str:
        return "{" + ", ".join(f"{kind}: {format_byte_rate(speed)}" for kind, speed in value.items()) + "}"


def read_topology(path: Path) -> Topology:
    """The cluster in a file; raises ConfigError with the line of a mistake."""
    return _topology(read_yaml(path))


def parse_topology(text: str, source: str) -> Topology:
    """As ``read_topology``, from YAML ``text``; source: its name in errors."""
    return _topology(parse_yaml(text, source))


def topology_section() -> Section:
    """The keys of a topology file."""
    rules: Rules = {
        (Link, "bytes_per_s"): byte_rate(),
        (PairLink, "bytes_per_s"): byte_rate(),
        (TopologyFile, "speeds"): Speeds(),
    }
    names = {"bytes_per_s": "bandwidth"}
    link = section_of(Link, rules, names)
    rules = {**rules, (Links, "host"): link, (Links, "network"): link}
    pair = section_of(PairLink, rules, names)
    rules = {**rules, (Links, "pairs"): Several(pair)}
    return section_of(TopologyFile, rules)


def _topology(table: Table) -> Topology:
    file: TopologyFile = topology_section().read(table, "")
    names = [device.name for device in file.devices]
    if not names:
        raise problem(place_of(table, "devices"), "devices", "name at least one device")
    for at, name in enumerate(names):
        if name in names[:at]:
            where = place_of(table, "devices", at, "name")
            raise problem(where, f"devices[{at}].name", f"there is already a device named {name!r}")
    pairs: dict[frozenset[str], Link] = {}
    for at, pair in enumerate(file.links.pairs):
        where, path = place_of(table, "links", "pairs", at, "devices"), f"links.pairs[{at}].devices"
        ends = frozenset(pair.devices)
        if len(pair.devices) != 2 or len(ends) != 2:
            raise problem(where, path, "name two devices")
        for name in pair.devices:
            if name not in names:
                possible = hint(name, names) or f"; there are {', '.join(names)}"
                raise problem(where, path, f"there is no device {name!r}{possible}")
        if ends in pairs:
            raise problem(where, path, f"the link of {' and '.join(pair.devices)} is already given")
        pairs[ends] = Link(pair.bytes_per_s, pair.latency_s)
    cluster = ClusterSpec(
        devices=file.devices, host_link=file.links.host, network=file.links.network, pairs=pairs
    )
    return Topology(cluster, file.speeds)


def format_topology(topology: Topology) -> str:
    """YAML that is read back as the same topology; rates to the byte, latencies to the nanosecond."""
    cluster = topology.cluster
    lines = [
        "# Devices and links of a cluster, as `shoal topology` found them; edit what you know better.",
        "# Rates are those of data sheets, latencies are typical ones: neither is measured.",
        "devices:",
    ]
    lines += [
        f"  - {{name: {_plain(one.name)}, kind: {_plain(one.kind)}, host: {_plain(one.host)}, "
        f"memory: {format_size(one.memory_bytes)}}}"
        for one in cluster.devices
    ]
    lines += [
        "links:",
        f"  host: {{{_link(cluster.host_link)}}}  # between devices of one host",
        f"  network: {{{_link(cluster.network)}}}  # between hosts",
    ]
    if cluster.pairs:
        lines.append("  pairs:  # other than that")
        order = {device.name: at for at, device in enumerate(cluster.devices)}
        for pair, link in cluster.pairs.items():
            first, second = sorted(pair, key=order.__getitem__)
            lines.append(f"    - {{devices: [{_plain(first)}, {_plain(second)}], {_link(link)}}}")
    if topology.bytes_per_s:
        lines.append("speeds:  # of reading memory, a second, for kinds without a data sheet on record")
        lines += [
            f"  {_plain(kind)}: {format_byte_rate(speed)}" for kind, speed in topology.bytes_per_s.items()
        ]
    return "\n".join(lines) + "\n"


def _link(link: Link) -> str:
    microseconds = f"{link.latency_s * 1e6:.3f}".rstrip("0").rstrip(".")
    return f"bandwidth: {format_byte_rate(link.bytes_per_s)}, latency: {microseconds}us"


def _plain(text: str) -> str:
    """Text as it is where that is safe, else in quotes."""
    return text if _WORD.fullmatch(text) and text.lower() != "null" else json.dumps(text, ensure_ascii=False)
