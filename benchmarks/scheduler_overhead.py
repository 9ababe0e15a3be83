"""Time of one scheduling decision, without a model.

    python -m benchmarks.scheduler_overhead [--running 256] [--waiting 10000] [--services 1] [--preempt]

Blocks have 16 tokens, and the pool is so full that the head of the queue is examined and not admitted at most
steps. Prints, for every order and admission, median and 99th percentile of ``schedule()`` and ``update()`` in
microseconds, with about ``running`` running and ``waiting`` queued requests; and the median of a fixed loop
in between, as a measure of the machine's speed. A line ends with ! if the median of ``schedule()`` is above
500 us or its 99th percentile above 2 ms.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shoal.core import Request, SamplingParams, StepPlan, StepResult, percentile
from shoal.kvcache import BlockPool, KVShape, LayerShape, PoolLayout, ServiceLayout
from shoal.schedule import (
    ADMISSIONS,
    ORDERS,
    DoublingBudget,
    Order,
    Scheduler,
    SchedulerOptions,
    ServiceLimits,
)
from shoal.schedule.policies.orders.doubling_budget import VARIANTS

BLOCK_SIZE = 16
CONTEXT = 4_096
STEP_NS = 20_000_000
WARMUP_STEPS = 1_000
COUNTERS = [[0] for _ in range(256)]
POOL_TOKENS = 250
"""Initial pool size per running request; it is adjusted until about ``running`` requests run."""


def make_pool(blocks: int, services: int) -> BlockPool:
    shape = KVShape(dtype="bfloat16", layers=(LayerShape(1, 8, 8),))
    layouts = {
        name: ServiceLayout(name, shape, stride_bytes=512, blocks_per_merged=1, layers=())
        for name in map(str, range(services))
    }
    return BlockPool(PoolLayout("merged", BLOCK_SIZE, 512, blocks, layouts))


def make_request(number: int, services: int, random: Random) -> Request:
    output = random.randint(100, 400)
    return Request(
        id=str(number),
        service=str(number % services),
        prompt=[random.randrange(50_000) for _ in range(random.randint(16, 128))],
        sampling=SamplingParams(max_tokens=500),
        true_output_tokens=output,
    )


@dataclass(frozen=True)
class Load:
    """``running`` and ``waiting`` requests of ``services`` services, for ``steps`` steps."""

    running: int
    waiting: int
    services: int
    steps: int
    preempt: bool


def make_scheduler(order: Order, admission: str, load: Load, pool_tokens: float) -> Scheduler:
    blocks = round(load.running * pool_tokens / BLOCK_SIZE)
    return Scheduler(
        make_pool(blocks, load.services),
        {str(number): ServiceLimits(CONTEXT, execution_s=10.0) for number in range(load.services)},
        SchedulerOptions(
            order=order,
            admission=ADMISSIONS[admission](),
            max_running=2 * load.running,
            preempt_for_waiting="less-urgent" if load.preempt else "never",
            victim="lowest-priority",
        ),
    )


def fixed_loop() -> float:
    """Microseconds of a fixed amount of work."""
    started = time.perf_counter_ns()
    for counter in COUNTERS:
        counter[0] += 1
    return (time.perf_counter_ns() - started) / 1e3


def measure(order: Order, admission: str, load: Load, pool_tokens: float) -> list[tuple[float, ...]]:
    """Microseconds of schedule(), update() and the fixed loop, and requests running, of each step."""
    random = Random(0)
    scheduler = make_scheduler(order, admission, load, pool_tokens)
    submitted = now = queued = 0
    times: list[tuple[float, ...]] = []
    for step in range(WARMUP_STEPS + load.steps):
        while queued < load.waiting:
            scheduler.submit(make_request(submitted, load.services, random), now)
            submitted += 1
            queued += 1
        started = time.perf_counter_ns()
        plan = scheduler.schedule(now)
        planned = time.perf_counter_ns()
        assert isinstance(plan, StepPlan)
        result = StepResult.of_step([7] * len(plan.sampled), STEP_NS)
        now += STEP_NS
        before = time.perf_counter_ns()
        scheduler.update(plan, result, now)
        done = time.perf_counter_ns()
        counts = scheduler.stats().services.values()
        queued = sum(one.waiting for one in counts)
        if step >= WARMUP_STEPS:
            running = sum(one.running for one in counts)
            times.append(((planned - started) / 1e3, (done - before) / 1e3, fixed_loop(), running))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--services", type=int, default=1)
    parser.add_argument("--preempt", action="store_true", help="let waiting requests preempt running ones")
    parser.add_argument("--orders", default="", help="only orders whose name contains this")
    parser.add_argument("--admissions", default="", help="only admissions whose name contains this")
    arguments = parser.parse_args()
    orders: dict[str, Order] = {name: cls() for name, cls in ORDERS.items() if name != "doubling-budget"}
    orders |= {f"doubling-budget {variant}": DoublingBudget(variant=variant) for variant in VARIANTS}
    print(f"{'order':<24} {'admission':<13} running{'schedule us':>20}{'update us':>19}{'loop us':>11}")
    print(f"{'':<46}" + f"{'median':>9} {'p99':>8} " * 2 + f"{'median':>9}")
    load = Load(arguments.running, arguments.waiting, arguments.services, arguments.steps, arguments.preempt)
    # Exclude long-lived objects from garbage collection, as in the engine's process.
    gc.freeze()
    for name, order in orders.items():
        for admission in ADMISSIONS:
            if arguments.orders in name and arguments.admissions in admission:
                report(name, order, admission, load)


def report(name: str, order: Order, admission: str, load: Load) -> None:
    pool_tokens = float(POOL_TOKENS)
    for _ in range(4):
        schedule, update, loop, running = zip(*measure(order, admission, load, pool_tokens), strict=True)
        share = percentile(running, 50) / load.running
        if 0.9 <= share <= 1.1:
            break
        pool_tokens /= max(share, 0.25)
    slow = percentile(schedule, 50) > 500 or percentile(schedule, 99) > 2_000
    print(
        f"{name:<24} {admission:<13}{percentile(running, 50):>8.0f} {_figures(schedule)}{_figures(update)}"
        f"{percentile(loop, 50):>11.1f}" + (" !" if slow else ""),
        flush=True,
    )


def _figures(values: Sequence[float]) -> str:
    return f"{percentile(values, 50):>10.0f} {percentile(values, 99):>8.0f}"


if __name__ == "__main__":
    main()
