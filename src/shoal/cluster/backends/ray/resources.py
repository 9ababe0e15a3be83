"""Resources (CPUs, GPUs) that an engine needs of a Ray node, and whether any node has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.engine.process.config import EngineConfig

_KINDS = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class ResourceNeeds:
    """Ray resources reserved for an engine."""

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def resource_needs(config: EngineConfig) -> ResourceNeeds:
    """A CPU per thread (1 by default), and a GPU for an engine that runs on one."""
    return ResourceNeeds(config.options.threads or 1, int(config.options.device.startswith("cuda")))


def with_threads(config: EngineConfig) -> EngineConfig:
    """The configuration with a thread per reserved CPU."""
    return replace(config, options=replace(config.options, threads=resource_needs(config).cpus))


def fits_any_node(needs: ResourceNeeds, nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an engine would fit on an otherwise empty node."""
    return any(
        node["Alive"]
        and node["Resources"].get("CPU", 0) >= needs.cpus
        and node["Resources"].get("GPU", 0) >= needs.gpus
        for node in nodes
    )


def describe_capacity(
    needs: ResourceNeeds, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]
) -> str:
    """Needed, existing and free resources, in words."""
    has = ", ".join(
        f"{node['NodeManagerAddress']} has {_amounts(node['Resources'])}" for node in nodes if node["Alive"]
    )
    return (
        f"an engine needs {needs} on one node of the Ray cluster; {has or 'no node is alive'}; "
        f"free are {_amounts(free)} in all"
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(
        f"{resources.get(kind, 0):g} {kind}" for kind in _KINDS if kind == "CPU" or resources.get(kind, 0)
    )
