"""Results of ``shoal topology``: tables of devices, links and device maps."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from shoal.core import ConfigError
from shoal.core.cluster import Link
from shoal.place.device_maps import OBJECTIVES, DeviceMap, MapProblem, find_map, greedy_map
from shoal.place.topology import Topology

_NUMBERS = {"memory", "reads", "rate", "latency", "devices", "time a token"}


def device_table(topology: Topology) -> Table:
    """One row for each device, with its memory bandwidth where known."""
    cluster = topology.cluster
    speeds = topology.known_speeds()
    table = _table("device", "kind", "host", "memory", "reads")
    for device in cluster.devices:
        speed = speeds.get(device.kind)
        reads = "unknown" if speed is None else f"{speed / 1e9:,.0f} GB/s"
        memory = f"{device.memory_bytes / 2**30:,.1f} GiB"
        table.add_row(device.name, device.kind, device.host, memory, reads)
    return table


def link_table(topology: Topology) -> Table:
    """The links inside hosts, between hosts, and of pairs with a link of their own."""
    cluster = topology.cluster
    table = _table("between", "rate", "latency")
    if len(cluster.devices) > len(cluster.hosts()):
        table.add_row("devices of one host", *_link(cluster.host_link))
    table.add_row("hosts", *_link(cluster.network))
    for pair, link in cluster.pairs.items():
        table.add_row(" and ".join(sorted(pair)), *_link(link))
    return table


def map_table(problem: MapProblem) -> Table:
    """The best map for each objective, and the greedy one; ``time a token``: of a batch of one token."""
    title = f"{len(problem.layer_bytes)} layers of {sum(problem.layer_bytes) / 2**30:,.2f} GiB"
    table = _table("map", "devices", "time a token", "layers", "optimum")
    table.title = title
    for name, objective in OBJECTIVES.items():
        found = find_map(problem, objective)
        gap = "exact" if found.exact else f"at most {found.score / found.bound - 1:.1%} off"
        _add_map(table, name, found.device_map, gap)
    try:
        _add_map(table, "greedy", greedy_map(problem), "not searched")
    except ConfigError:  # greedy filling may not fit where other maps do
        table.add_row("greedy", "-", "-", "does not fit", "not searched")
    return table


def _add_map(table: Table, name: str, found: DeviceMap, proof: str) -> None:
    layers = ", ".join(
        f"{stage.device}: {stage.first}-{stage.first + stage.layers - 1}" for stage in found.stages
    )
    table.add_row(name, str(len(found.stages)), f"{found.cost_s * 1e3:,.2f} ms", layers, proof)


def _link(link: Link) -> Sequence[str]:
    return f"{link.bytes_per_s / 1e9:,.2f} GB/s", f"{link.latency_s * 1e6:,.0f} us"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    return table
