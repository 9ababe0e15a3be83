"""Problems for device maps, and every map there is of small ones."""

from collections.abc import Mapping, Sequence
from random import Random

from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.place.device_maps import MapProblem

SPEEDS = {"quick": 4.0, "middling": 2.0, "slow": 1.0}


def problem(
    rooms: Sequence[int],
    kinds: Sequence[str],
    links_s: Mapping[tuple[int, int], float],
    layer_bytes: Sequence[int],
    **options: int,
) -> MapProblem:
    """A problem with these devices; links_s: seconds between pairs of devices, 1 s where there is none."""
    devices = [
        Device(name=f"d{at}", kind=kind, host="h", memory_bytes=room)
        for at, (room, kind) in enumerate(zip(rooms, kinds, strict=True))
    ]
    pairs = {frozenset((f"d{i}", f"d{j}")): Link(1.0, time_s) for (i, j), time_s in links_s.items()}
    cluster = ClusterSpec(devices=devices, host_link=Link(1.0, 1.0), network=Link(1.0, 1.0), pairs=pairs)
    return MapProblem(cluster=cluster, layer_bytes=layer_bytes, bytes_per_s=SPEEDS, **options)


def random_problem(seed: int, most_devices: int, most_layers: int, uniform: bool) -> MapProblem:
    """Devices that are all different, or of few classes, with links at random, by class, or by host."""
    random = Random(seed)
    n = random.randint(1, most_devices)
    layers = random.randint(max(1, n - 1), most_layers)
    sizes = [3] * layers if uniform else [random.randint(1, 5) for _ in range(layers)]
    classes = random.randint(1, n)
    owner = [random.randrange(classes) for _ in range(n)]
    most_room = 3 * random.randint(1, 3) if random.random() < 0.7 else 3 * layers
    room = [random.randint(3, most_room) for _ in range(n)]
    kind = [random.choice(list(SPEEDS)) for _ in range(n)]
    by_device = random.random() < 0.4
    rooms = [room[at if by_device else owner[at]] for at in range(n)]
    kinds = [kind[at if by_device else owner[at]] for at in range(n)]
    longest = random.choice([0, 2, 20])
    link = {(i, j): float(random.randint(0, longest)) for i in range(n) for j in range(i, n)}
    if random.random() < 0.3:
        link = {(i, j): 1.0 if i == j else 7.0 for i, j in link}
    by_class = random.random() < 0.6
    times_s = {
        (i, j): link[min(owner[i], owner[j]), max(owner[i], owner[j])] if by_class else link[i, j]
        for i in range(n)
        for j in range(i + 1, n)
    }
    return problem(rooms, kinds, times_s, sizes)


def cheapest_by_devices(problem: MapProblem) -> dict[int, float]:
    """The least cost of all maps with each number of devices, by trying every map."""
    devices, sizes = problem.cluster.devices, problem.layer_bytes
    between = [[0.0 if a is b else problem.crossing_s(a, b) for b in devices] for a in devices]
    found: dict[int, float] = {}

    def extend(used: tuple[int, ...], done: int, cost_s: float) -> None:
        if done == len(sizes):
            found[len(used)] = min(cost_s, found.get(len(used), cost_s))
            return
        for at, device in enumerate(devices):
            if at in used:
                continue
            spent_s = cost_s + (between[used[-1]][at] if used else 0.0)
            weights = 0
            for end in range(done, len(sizes)):
                weights += sizes[end]
                if weights > problem.room_bytes(device):
                    break
                extend((*used, at), end + 1, spent_s + weights / problem.bytes_per_s[device.kind])

    extend((), 0, 0.0)
    return found


def classes_problem(seed: int, classes: int, size: int, layers: int) -> MapProblem:
    """Classes of as many devices, with links at random between classes and faster ones within."""
    random = Random(seed)
    link = {(i, j): 2.0 + 9 * random.random() for i in range(classes) for j in range(i + 1, classes)}
    link |= {(i, i): 2 * random.random() for i in range(classes)}
    owner = [at % classes for at in range(classes * size)]
    rooms = [random.randint(3, 12) for _ in range(classes)]
    kinds = [random.choice(list(SPEEDS)) for _ in range(classes)]
    times_s = {
        (i, j): link[min(owner[i], owner[j]), max(owner[i], owner[j])]
        for j in range(len(owner))
        for i in range(j)
    }
    of = [owner[at] for at in range(len(owner))]
    return problem([rooms[at] for at in of], [kinds[at] for at in of], times_s, [3] * layers)
