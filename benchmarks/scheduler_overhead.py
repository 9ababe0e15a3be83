"""How long one scheduling decision takes, without a model.

    python benchmarks/scheduler_overhead.py [--running 256] [--waiting 10000] [--steps 300]

One service, blocks of 16 tokens, a pool that is full enough for the head of the queue to be examined and
refused at most steps. Prints, for every order and admission, median and 99th percentile of ``schedule()``
and ``update()`` in microseconds, over steps of ``running`` decodes with ``waiting`` requests queued.
"""

import argparse
import time
from collections.abc import Sequence
from random import Random

from shoal.core import Request, SamplingParams, StepPlan, StepResult, percentile
from shoal.kvcache import BlockPool, KVShape, LayerShape, PoolLayout, ServiceLayout
from shoal.schedule import ADMISSIONS, ORDERS, Scheduler, SchedulerOptions, ServiceLimits

BLOCK_SIZE = 16
CONTEXT = 4_096


def make_pool(blocks: int) -> BlockPool:
    shape = KVShape(dtype="bfloat16", layers=(LayerShape(1, 8, 8),))
    service = ServiceLayout("chat", shape, stride_bytes=512, blocks_per_merged=1, layers=())
    return BlockPool(PoolLayout("merged", BLOCK_SIZE, 512, blocks, {"chat": service}))


def make_request(number: int, random: Random) -> Request:
    output = random.randint(200, 800)
    return Request(
        id=str(number),
        service="chat",
        prompt=[random.randrange(50_000) for _ in range(random.randint(16, 128))],
        sampling=SamplingParams(max_tokens=1_000),
        true_output_tokens=output,
    )


def measure(
    order: str, admission: str, running: int, waiting: int, steps: int
) -> list[tuple[float, float, int]]:
    """Microseconds of schedule() and update(), and sequences, of each measured step."""
    random = Random(0)
    # Enough for about ``running`` requests of the mean length at once.
    tokens = {"conservative": 1_072, "aggressive": 540, "past-future": 500, "oracle": 385}[admission]
    scheduler = Scheduler(
        make_pool(running * tokens // BLOCK_SIZE),
        {"chat": ServiceLimits(CONTEXT)},
        SchedulerOptions(order=order, admission=ADMISSIONS[admission](), max_running=2 * running),
    )
    submitted = 0
    times = []
    warmup = 400
    for step in range(warmup + steps):
        while scheduler.stats().services["chat"].waiting < waiting:
            scheduler.submit(make_request(submitted, random), 0)
            submitted += 1
        started = time.perf_counter_ns()
        plan = scheduler.schedule(0)
        planned = time.perf_counter_ns()
        assert isinstance(plan, StepPlan)
        result = StepResult([7] * len(plan.sampled), 1_000_000)
        before = time.perf_counter_ns()
        scheduler.update(plan, result, 0)
        done = time.perf_counter_ns()
        if step >= warmup:
            times.append(((planned - started) / 1e3, (done - before) / 1e3, len(plan.sequences)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'order':<12} {'admission':<13} running{'schedule us':>20}{'update us':>19}{'both us':>19}")
    print(f"{'':<35}" + f"{'median':>9} {'p99':>8} " * 3)
    for order in ORDERS:
        for admission in ADMISSIONS:
            times = measure(order, admission, arguments.running, arguments.waiting, arguments.steps)
            schedule, update, sequences = (list(column) for column in zip(*times, strict=True))
            both = [first + second for first, second in zip(schedule, update, strict=True)]
            figures = "".join(_figures(column) for column in (schedule, update, both))
            print(f"{order:<12} {admission:<13}{percentile(sequences, 50):>8.0f} {figures}")


def _figures(values: Sequence[float]) -> str:
    return f"{percentile(values, 50):>10.0f} {percentile(values, 99):>8.0f}"


if __name__ == "__main__":
    main()
