"""Run time of the search for a device map, on one core.

    python -m benchmarks.device_maps
    python -m benchmarks.device_maps --classes 14 --devices 14 --layers 40

Devices are in classes of equal memory, speed and links. Links are random between classes, and faster within
a class; or by host and network, with a host for each class.
"""

import argparse
import time
from random import Random

from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.place.device_maps import OBJECTIVES, MapProblem, find_map, greedy_map

GB = 10**9
BYTES_PER_S = {"large": 2000 * GB, "middling": 900 * GB, "small": 300 * GB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.layers} layers over {options.devices} devices in {options.classes} classes")
    print(f"{'links':<10}{'objective':<11}{'time':>8}{'devices':>9}{'cost':>10}{'greedy':>10}  gap")
    for links in ("random", "by host"):
        problem = classes_problem(options.devices, options.classes, options.layers, links, options.seed)
        greedy_ms = greedy_map(problem).cost_s * 1e3
        for name, objective in OBJECTIVES.items():
            begun_s = time.perf_counter()
            found = find_map(problem, objective)
            took_s = time.perf_counter() - begun_s
            gap = "exact" if found.exact else f"at most {found.score / found.bound - 1:.1%}"
            used, cost_ms = len(found.device_map.devices), found.device_map.cost_s * 1e3
            print(
                f"{links:<10}{name:<11}{took_s:>6.2f} s{used:>9}{cost_ms:>7.1f} ms{greedy_ms:>7.1f} ms  {gap}"
            )


def classes_problem(devices: int, classes: int, layers: int, links: str, seed: int) -> MapProblem:
    random = Random(seed)
    kinds = [random.choice(list(BYTES_PER_S)) for _ in range(classes)]
    memory = [random.randint(4, 12) * GB for _ in range(classes)]
    within_s = [random.uniform(5e-6, 2e-5) for _ in range(classes)]
    between_s = {(i, j): random.uniform(2e-5, 3e-4) for j in range(classes) for i in range(j)}
    of = [at % classes for at in range(devices)]
    cluster_devices = [
        Device(name=f"d{at}", kind=kinds[own], host=f"h{own}", memory_bytes=memory[own])
        for at, own in enumerate(of)
    ]
    pairs = {}
    if links == "random":
        for j in range(devices):
            for i in range(j):
                own, other = sorted((of[i], of[j]))
                time_s = within_s[own] if own == other else between_s[own, other]
                pairs[frozenset((f"d{i}", f"d{j}"))] = Link(64 * GB, time_s)
    cluster = ClusterSpec(
        devices=cluster_devices, host_link=Link(64 * GB, 1e-5), network=Link(12 * GB, 1e-4), pairs=pairs
    )
    return MapProblem(
        cluster=cluster, layer_bytes=[int(1.7 * GB)] * layers, bytes_per_s=BYTES_PER_S, reserve_bytes=GB
    )


if __name__ == "__main__":
    main()
