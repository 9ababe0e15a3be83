"""Speed of the KV pool's block allocator, and memory waste of its layouts.

    python -m benchmarks.kvcache_pool [--memory-mib 2048] [--seconds 1] [--sweep]

Two services with the KV shapes of SmolLM2-135M (30 layers, 3 KV heads of 64) and Gemma 3 270M (18
layers, 1 KV head of 256), bfloat16, blocks of 16 tokens. Speed: blocks per second of allocate plus
free in bulks of 86 blocks, into an empty pool and into one whose free blocks are scattered. Waste: a
random mixed workload of sequences that grow token by token and end, with the pool kept full.
"""

import argparse
import random
import time
from dataclasses import dataclass, replace

from shoal.kvcache import BlockPool, KVShape, LayerShape, PoolLayout, plan_layout

BULK = 86
SHAPES = {
    "smollm2": KVShape("bfloat16", tuple(LayerShape(3, 64, 64) for _ in range(30))),
    "gemma3-270m": KVShape("bfloat16", tuple(LayerShape(1, 256, 256) for _ in range(18))),
}


def measure_speed(pool: BlockPool, service: str, seconds: float, held: list[list[int]]) -> float:
    """Blocks per second of freeing and allocating each table of ``held`` in turn."""
    done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for place, table in enumerate(held):
            pool.free(service, table)
            fresh = pool.allocate(service, len(table))
            assert fresh is not None
            held[place] = fresh
            done += len(table)
    return done / (time.perf_counter() - start)


def scattered_tables(pool: BlockPool, service: str, tables: int) -> list[list[int]]:
    """Tables of 86 random blocks each, among three times as many."""
    blocks = pool.allocate(service, 3 * BULK * tables)
    assert blocks is not None
    random.Random(0).shuffle(blocks)
    pool.free(service, blocks[BULK * tables :])
    return [blocks[BULK * place : BULK * (place + 1)] for place in range(tables)]


@dataclass
class Sequence:
    """A running sequence of the mixed workload."""

    service: str
    table: list[int]
    tokens: int
    final_tokens: int


@dataclass
class Waste:
    """Means over the workload: shares of the pool, and the number of running sequences."""

    live: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    running: float = 0.0


def grow(pool: BlockPool, sequence: Sequence) -> bool:
    """Add a token; False if no block is left for it."""
    if sequence.tokens == len(sequence.table) * pool.block_size:
        blocks = pool.allocate(sequence.service, 1)
        if blocks is None:
            return False
        sequence.table += blocks
    sequence.tokens += 1
    return True


def join(pool: BlockPool, draw: random.Random, share: float) -> Sequence | None:
    """A new sequence, of SmolLM2 with probability ``share``."""
    service = "smollm2" if draw.random() < share else "gemma3-270m"
    prompt = 1 + min(int(draw.expovariate(1 / 200)), 1500)
    table = pool.allocate(service, -(-prompt // pool.block_size))
    if table is None:
        return None
    return Sequence(service, table, prompt, prompt + 1 + min(int(draw.expovariate(1 / 150)), 500))


def measure_waste(layout: PoolLayout, steps: int) -> Waste:
    """Run the mixed workload with an alternating mix of services; preempts the newest sequence if needed."""
    pool = BlockPool(layout)
    draw = random.Random(1)
    running: list[Sequence] = []
    waste = Waste()
    for step in range(steps):
        share = 0.9 if step // 400 % 2 else 0.1
        while (sequence := join(pool, draw, share)) is not None:
            running.append(sequence)
        for sequence in list(running):
            while sequence in running and not grow(pool, sequence):
                newest = running.pop()
                pool.free(newest.service, newest.table)
        for sequence in [one for one in running if one.tokens >= one.final_tokens]:
            pool.free(sequence.service, sequence.table)
            running.remove(sequence)
        tokens = {name: sum(one.tokens for one in running if one.service == name) for name in SHAPES}
        usage = pool.usage()
        waste.live += usage.live_bytes / usage.total_bytes / steps
        waste.internal += usage.internal(tokens) / steps
        waste.external += usage.external() / steps
        waste.running += len(running) / steps
    pool.check_integrity({name: [one.table for one in running if one.service == name] for name in SHAPES})
    return waste


def coarser(layout: PoolLayout, times: int) -> PoolLayout:
    """The same merged layout with ``times`` as many sub-blocks in each merged block."""
    services = {
        name: replace(view, blocks_per_merged=view.blocks_per_merged * times)
        for name, view in layout.services.items()
    }
    return replace(
        layout,
        merged_bytes=layout.merged_bytes * times,
        merged_blocks=layout.merged_blocks // times,
        services=services,
    )


def report_speed(memory_bytes: int, seconds: float) -> None:
    print(f"{'layout':8} {'service':12} {'fresh':>12} {'scattered':>12}   blocks/s in bulks of {BULK}")
    for kind in ("merged", "split"):
        layout = plan_layout(SHAPES, memory_bytes=memory_bytes, block_size=16, kind=kind)
        for service in SHAPES:
            pool = BlockPool(layout)
            fresh = measure_speed(pool, service, seconds, [pool.allocate(service, BULK) or []])
            pool = BlockPool(layout)
            held = scattered_tables(pool, service, pool.max_blocks(service) // (3 * BULK))
            scattered = measure_speed(pool, service, seconds, held)
            print(f"{kind:8} {service:12} {fresh:12,.0f} {scattered:12,.0f}")


def report_waste(layouts: dict[str, PoolLayout], steps: int) -> None:
    print(
        f"{'layout':8} {'blocks per merged':>18} {'padding':>8} {'live':>8} {'internal':>9} {'external':>9}"
        f" {'running':>8}   mixed workload in a full pool"
    )
    for title, layout in layouts.items():
        counts = "+".join(str(view.blocks_per_merged) for view in layout.services.values())
        padding = sum(layout.padding(name) for name in SHAPES) / len(SHAPES)
        waste = measure_waste(layout, steps)
        print(
            f"{title:8} {counts:>18} {padding:8.1%} {waste.live:8.1%} {waste.internal:9.1%}"
            f" {waste.external:9.1%} {waste.running:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-mib", type=int, default=2048, help="pool for the speed table")
    parser.add_argument("--waste-memory-mib", type=int, default=256, help="pool for the waste table")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each speed measurement")
    parser.add_argument("--steps", type=int, default=1600, help="of the mixed workload")
    parser.add_argument("--sweep", action="store_true", help="also with coarser merged blocks")
    args = parser.parse_args()
    report_speed(args.memory_mib << 20, args.seconds)
    print()
    memory = args.waste_memory_mib << 20
    layouts = {
        kind: plan_layout(SHAPES, memory_bytes=memory, block_size=16, kind=kind)
        for kind in ("merged", "split")
    }
    if args.sweep:
        layouts |= {f"x{times}": coarser(layouts["merged"], times) for times in (2, 4, 8, 16)}
    report_waste(layouts, args.steps)


if __name__ == "__main__":
    main()
