"""A model's layers, the devices that could have them, and what a map of one to the other costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.cluster import ClusterSpec, Device
from shoal.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MapProblem:
    """One model to be divided over a cluster's devices, which compute one after another.

    Raises ConfigError for a model without layers, sizes and speeds that are not positive, and kinds of
    devices without a speed.
    """

    cluster: ClusterSpec
    """The devices and links."""
    layer_bytes: Sequence[int]
    """Weights of each layer in the order in which they compute."""
    bytes_per_s: Mapping[str, float]
    """How fast each kind of device goes through weights (the paper's performance over its factor p)."""
    reserve_bytes: int = 0
    """Memory of each device that weights must leave, for KV and activations (the paper's T)."""
    activation_bytes: int = 0
    """What crosses a link from one device to the next."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
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
        """What weights may take of a device."""
        return device.memory_bytes - self.reserve_bytes

    def crossing_s(self, first: Device, second: Device) -> float:
        """How long activations take from one device to another."""
        link = self.cluster.link(first, second)
        return link.latency_s + self.activation_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that follow each other on one device."""

    device: str
    """The device's name."""
    first: int
    """The first of its layers, from 0."""
    layers: int
    """How many, at least one."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Every layer of a model on a device."""

    stages: tuple[Stage, ...]
    """In the order in which they compute; no device twice."""
    cost_s: float
    """Time of one pass: all stages one after another, and the links between them (the paper's Eqs. 5, 6)."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in use, in order."""
        return tuple(stage.device for stage in self.stages)


def stages_of(counts: Sequence[tuple[str, int]]) -> tuple[Stage, ...]:
    """Stages from devices and how many layers each has, in order."""
    stages, first = [], 0
    for device, layers in counts:
        stages.append(Stage(device, first, layers))
        first += layers
    return tuple(stages)


def evaluate(problem: MapProblem, stages: tuple[Stage, ...]) -> DeviceMap:
    """The map with its cost; raises ConfigError where it is not a map of this problem."""
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
