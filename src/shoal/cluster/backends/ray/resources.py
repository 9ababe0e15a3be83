"""What an engine needs of a machine of a Ray cluster, and which machines there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.engine.process.config import EngineConfig

_KINDS = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources of Ray that an engine has for itself."""

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def needs_of(config: EngineConfig) -> Needs:
    """A CPU for each of its threads, of which it has one unless more are written, and its GPU."""
    return Needs(config.options.threads or 1, 0 if config.options.device == "cpu" else 1)


def with_threads(config: EngineConfig) -> EngineConfig:
    """The configuration with as many threads as the engine has CPUs."""
    return replace(config, options=replace(config.options, threads=needs_of(config).cpus))


def fits_somewhere(needs: Needs, nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an engine would fit on one of Ray's nodes if nothing else ran there."""
    return any(
        node["Alive"]
        and node["Resources"].get("CPU", 0) >= needs.cpus
        and node["Resources"].get("GPU", 0) >= needs.gpus
        for node in nodes
    )


def describe_room(needs: Needs, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """What is needed, what there is, and what of it is free, in words."""
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
