"""Costs of layers and links as arrays, over the devices with room for a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Device
from shoal.core.errors import ConfigError
from shoal.place.device_maps.problem import MapProblem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_NAMED = 8
"""Limit on devices named in an error."""


@dataclass(frozen=True)
class Costs:
    """Costs of layers and links; n devices, L layers."""

    devices: tuple[Device, ...]
    """Those with room for the smallest layer, in the cluster's order."""
    layer_bytes: Integers
    """(L,)"""
    room_bytes: Integers
    """(n,): memory for weights."""
    byte_s: Floats
    """(n,): seconds per byte of weights."""
    between_s: Floats
    """(n, n): seconds from one device to another; 0 on the diagonal."""

    @classmethod
    def of(cls, problem: MapProblem) -> "Costs":
        """Raises ConfigError if the total memory is too small."""
        smallest, needed = min(problem.layer_bytes), sum(problem.layer_bytes)
        devices = tuple(d for d in problem.cluster.devices if problem.room_bytes(d) >= smallest)
        rooms = [problem.room_bytes(device) for device in devices]
        if sum(rooms) < needed:
            raise no_room(problem)
        between = np.zeros((len(devices), len(devices)))
        for i, first in enumerate(devices):
            for j in range(i):
                between[i, j] = between[j, i] = problem.crossing_s(first, devices[j])
        return cls(
            devices=devices,
            layer_bytes=np.array(problem.layer_bytes, dtype=np.int64),
            room_bytes=np.array(rooms, dtype=np.int64),
            byte_s=np.array([1 / problem.bytes_per_s[device.kind] for device in devices]),
            between_s=between,
        )

    def among(self, devices: Integers) -> "Costs":
        """Restricted to some devices."""
        return Costs(
            devices=tuple(self.devices[device] for device in devices),
            layer_bytes=self.layer_bytes,
            room_bytes=self.room_bytes[devices],
            byte_s=self.byte_s[devices],
            between_s=self.between_s[np.ix_(devices, devices)],
        )

    def with_layers_of(self, size_bytes: int) -> "Costs":
        """With all layers of one size."""
        return replace(self, layer_bytes=np.full_like(self.layer_bytes, size_bytes))

    def pass_s(self, counts: Sequence[tuple[int, int]]) -> float:
        """Seconds of a pass through a map; counts: (device, layers) in order."""
        devices = [device for device, _ in counts]
        until = np.concatenate([[0], np.cumsum(self.layer_bytes)])
        ends = np.cumsum([0, *(layers for _, layers in counts)])
        computing = (self.byte_s[devices] * np.diff(until[ends])).sum()
        return float(computing + self.between_s[devices[:-1], devices[1:]].sum())

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def uniform(self) -> bool:
        return bool((self.layer_bytes == self.layer_bytes[0]).all())

    @cached_property
    def room_layers(self) -> Integers:
        """(n,): uniform layers that fit, at most L."""
        return np.minimum(self.room_bytes // int(self.layer_bytes[0]), self.layers)

    @cached_property
    def layer_s(self) -> Floats:
        """(n,): seconds per uniform layer."""
        return self.byte_s * float(self.layer_bytes[0])

    @property
    def ideal_s(self) -> float:
        """Lower bound: all layers on the fastest device."""
        return float(self.byte_s.min() * self.layer_bytes.sum())

    @property
    def longest_s(self) -> float:
        """Upper bound on the time of a map."""
        slowest = float(self.byte_s.max() * self.layer_bytes.sum())
        return slowest + float(self.between_s.max(axis=1).sum())

    @cached_property
    def fewest_devices(self) -> int:
        """Lower bound on devices whose memory holds all weights (the paper's Eq. 4)."""
        most_bytes = np.cumsum(np.sort(self.room_bytes)[::-1])
        return int(np.searchsorted(most_bytes, self.layer_bytes.sum())) + 1


def no_room(problem: MapProblem, certain: bool = True) -> ConfigError:
    """The error for a model that does not fit; certain: False if merely no map was found."""
    rooms = ", ".join(
        f"{d.name} {_size(max(0, problem.room_bytes(d)))}" for d in problem.cluster.devices[:_NAMED]
    )
    more = len(problem.cluster.devices) - _NAMED
    what = "do not fit" if certain else "hardly fit, and no map was found"
    return ConfigError(
        f"{len(problem.layer_bytes)} layers of {_size(sum(problem.layer_bytes))} {what}; beside "
        f"{_size(problem.reserve_bytes)} reserved on each device there is room for: {rooms}"
        + (f" and on {more} more" if more > 0 else "")
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 // 100 else f"{size_bytes} bytes"
