"""Greedy device map (UELLM's BGS baseline): fill the device with the largest memory, then the next."""

from collections.abc import Sequence

from shoal.place.device_maps.costs import Integers, no_room
from shoal.place.device_maps.problem import DeviceMap, MapProblem, evaluate, stages_of


def greedy_map(problem: MapProblem) -> DeviceMap:
    """As many layers as fit on each device, largest memory first, ties in the cluster's order.

    Raises ConfigError if layers are left.
    """
    devices = problem.cluster.devices
    counts = filled_counts(problem.layer_bytes, [problem.room_bytes(device) for device in devices])
    if not counts:
        raise no_room(problem)
    return evaluate(problem, stages_of([(devices[device].name, layers) for device, layers in counts]))


def filled_counts(
    layer_bytes: Sequence[int] | Integers, room_bytes: Sequence[int] | Integers
) -> list[tuple[int, int]]:
    """(device, layers) with devices filled, largest memory first; empty if layers are left."""
    counts, first = [], 0
    for device in sorted(range(len(room_bytes)), key=lambda device: -room_bytes[device]):
        room, layers = room_bytes[device], 0
        while first < len(layer_bytes) and layer_bytes[first] <= room:
            room -= layer_bytes[first]
            first, layers = first + 1, layers + 1
        if layers:
            counts.append((device, layers))
    return counts if first == len(layer_bytes) else []
