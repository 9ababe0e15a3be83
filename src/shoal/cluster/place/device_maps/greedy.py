"""The paper's baseline: fill the device with the largest memory, then the next."""

from shoal.cluster.place.device_maps.costs import no_room
from shoal.cluster.place.device_maps.problem import DeviceMap, MapProblem, evaluate, stages_of


def greedy_map(problem: MapProblem) -> DeviceMap:
    """As many layers as fit on each device, largest memory first; raises ConfigError if some are left.

    The paper's BGS; where memory is equal, in the cluster's order.
    """
    counts, first = [], 0
    for device in sorted(problem.cluster.devices, key=lambda device: -device.memory_bytes):
        room, layers = problem.room_bytes(device), 0
        while first < len(problem.layer_bytes) and problem.layer_bytes[first] <= room:
            room -= problem.layer_bytes[first]
            first, layers = first + 1, layers + 1
        if layers:
            counts.append((device.name, layers))
    if first < len(problem.layer_bytes):
        raise no_room(problem)
    return evaluate(problem, stages_of(counts))
