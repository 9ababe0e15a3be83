"""CPU time of packing growing requests onto simulated engines.

    python -m benchmarks.packing
    python -m benchmarks.packing --packer mell-eager --requests 10000 --engines 32 --rate 1.2

Requests and engines are those of `python -m experiments mell-devices`, LLaMA2-7B on 24 GB.
"""

import argparse
import time

from experiments.mell import workload
from experiments.mell.setup import Expectations, model_on_device
from shoal.cluster.packing import PACKERS, DeviceGroup, Packing
from shoal.simulate.packed_cluster import PackedCluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packer", choices=list(PACKERS), default="mell-forecast")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2.6, help="requests per second")
    options = parser.parse_args()
    model = model_on_device("llama2-7b")
    requests = workload.mell_requests(options.rate, options.requests / options.rate, 0, model.capacity)
    groups = [DeviceGroup(name=f"g{number:03}", capacity=model.capacity) for number in range(options.engines)]
    packer = PACKERS[options.packer](Packing(groups))
    cluster = PackedCluster(packer, model.speed, expected=Expectations(model.capacity).forecast)
    begun_s = time.process_time()
    run = cluster.run(requests)
    print(f"{run.finished:,} requests in {time.process_time() - begun_s:.0f} s of CPU time")
    print(f"{max(run.active)} engines at the peak, {sum(run.active) / len(run.active):.1f} on average")
    print(f"{sum(run.migrations):,} migrations, {run.preemptions:,} preemptions")
    print(f"{sum(run.used) / sum(run.capacity):.1%} of the KV memory of active engines in use")


if __name__ == "__main__":
    main()
