"""The device-map problem: layers, devices, constraints, and the cost of a map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.cluster import ClusterSpec, Device
from shoal.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MapProblem:
    """One model to be divided over a cluster's devices, which compute in sequence.

    Raises ConfigError for a model without layers, non-positive sizes or speeds, and kinds of devices without
    a speed.
    """

    cluster: ClusterSpec
    layer_bytes: Sequence[int]
    """Weights of each layer, in order of computation."""
    bytes_per_s: Mapping[str, float]
    """Rate at which each kind of device reads weights (the paper's performance over its factor p)."""
    reserve_bytes: int = 0
    """Memory of each device reserved for KV and activations (the paper's T)."""
    activation_bytes: int = 0
    """Bytes sent over a link between two stages."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not self.layer_bytes or min(self.layer_bytes) < 1:
            raise ConfigError("a device map needs layers of at least one byte each")
        if self.reserve_bytes < 0 or self.activation_bytes < 0:
            raise ConfigError("reserved memory and activations cannot be negative")
        for device in self.cluster.devices:
            if not self.bytes_per_s.get(device.kind, 0) > 0:
                raise ConfigError(
                    f"device {device.name} is of kind {device.kind!r}, which has no speed; "
                    f"there are speeds for {', '.join(self.bytes_per_s) or 'none'}"
                )

    def room_bytes(self, device: Device) -> int:
        """Memory for weights on a device."""
        return device.memory_bytes - self.reserve_bytes

    def crossing_s(self, first: Device, second: Device) -> float:
        """Time of activations from one device to another."""
        link = self.cluster.link(first, second)
        return link.latency_s + self.activation_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one device."""

    device: str
    """Name of the device."""
    first: int
    """Its first layer, from 0."""
    layers: int
    """Number of layers, at least 1."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """An assignment of all layers of a model to devices."""

    stages: tuple[Stage, ...]
    """In order of computation; no device twice."""
    cost_s: float
    """Time of one pass: all stages in sequence, and the links between them (the paper's Eqs. 5, 6)."""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(stage.device for stage in self.stages)


def stages_of(counts: Sequence[tuple[str, int]]) -> tuple[Stage, ...]:
    """Stages from (device, layers), in order."""
    stages, first = [], 0
    for device, layers in counts:
        stages.append(Stage(device, first, layers))
        first += layers
    return tuple(stages)


def evaluate(problem: MapProblem, stages: tuple[Stage, ...]) -> DeviceMap:
    """The map with its cost; raises ConfigError if it is invalid for this problem."""
    devices = {device.name: device for device in problem.cluster.devices}
    names = [stage.device for stage in stages]
    if len(set(names)) < len(names) or not set(names) <= set(devices):
        raise ConfigError(f"a device map names devices of the cluster, each once, got {', '.join(names)}")
    ends = [0, *(stage.first + stage.layers for stage in stages)]
    if [stage.first for stage in stages] != ends[:-1] or ends[-1] != len(problem.layer_bytes):
        raise ConfigError("the stages of a device map must have every layer once, in order")
    cost_s = 0.0
    for stage in stages:
        device = devices[stage.device]
        weights = sum(problem.layer_bytes[stage.first : stage.first + stage.layers])
        if stage.layers < 1 or weights > problem.room_bytes(device):
            raise ConfigError(
                f"device {stage.device} has no room for {stage.layers} layers of {weights} bytes"
            )
        cost_s += weights / problem.bytes_per_s[device.kind]
    for before, after in pairwise(stages):
        cost_s += problem.crossing_s(devices[before.device], devices[after.device])
    return DeviceMap(stages, cost_s)
