"""GPU check, part `times`: times of one layer's attention, relative to the copy bandwidth.

Blocks have all layers of a model, for the strides of real serving; fewer if memory is short. Keys and values
are read once, so their bytes per second, relative to those of a copy, show how close a kernel is to optimal.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase
from benchmarks.gpu_check.pool import Heads, Pool, Row, pool_bytes
from benchmarks.gpu_check.timing import Work, copy_gb_per_s, free_bytes, median_ms, recorded
from shoal.execute.gpu.kernels.decode import NUM_STAGES, NUM_WARPS, attend_decodes, plan_work, programs_of
from shoal.execute.gpu.kernels.prompts import TileShape, attend_prompts, most_tiles, prompt_tiles, tile_shape
from shoal.execute.gpu.step import StepInputs

LLAMA_8B = Heads("Llama 3.1 8B", 32, 8, 128)
GEMMA_3 = Heads("Gemma 3 1B", 4, 1, 256, window=512)
TINY = Heads("tiny", 2, 1, 16)
LAYERS = 32
_DTYPE = "bfloat16"
_MEMORY_SHARE = 0.7
_SECONDS = 2.0
_SHOWN_CASES = 6
"""Number of cases on the part's line."""

Tuning = tuple[int, int, int]
"""Keys that a thread block attends at once, its warps, and stages of its loop."""
DECODE_TUNINGS: tuple[Tuning, ...] = (
    (64, 4, 3),
    (64, 4, 5),
    (32, 4, 5),
    (32, 2, 5),
    (64, 8, 3),
    (128, 8, 3),
    (128, 4, 3),
)
PROMPT_SHAPES = (
    TileShape(128, 64, 8, 3),
    TileShape(128, 64, 8, 2),
    TileShape(128, 128, 8, 3),
    TileShape(64, 64, 4, 3),
)


@dataclass(frozen=True)
class AttentionCase:
    """One timed attention call.

    layers: of a block, at most. swept: in several ways.
    """

    name: str
    rows: tuple[Row, ...]
    heads: Heads = LLAMA_8B
    layers: int = LAYERS
    layout: str = "merged"
    swept: bool = False

    @property
    def decodes(self) -> bool:
        return all(end - first == 1 for first, end in self.rows)


def decode(rows: int, tokens: int, of: Heads = LLAMA_8B) -> AttentionCase:
    return AttentionCase(f"decode {rows} x {tokens}", ((tokens - 1, tokens),) * rows, of)


def one_long(long: int, short: int, others: int, of: Heads = LLAMA_8B) -> AttentionCase:
    rows = ((long - 1, long), *((short - 1, short),) * others)
    return AttentionCase(f"decode 1 x {long} beside {others} x {short}", rows, of)


def variant(plain: AttentionCase, change: str, **changes: object) -> AttentionCase:
    return AttentionCase(**{**vars(plain), "name": f"{plain.name}, {change}", **changes})


def swept(plain: AttentionCase) -> AttentionCase:
    return variant(plain, "several ways", swept=True)


def prompt(first: int, end: int, of: Heads = LLAMA_8B) -> AttentionCase:
    return AttentionCase(f"prompt, tokens {first} to {end}", ((first, end),), of)


def prompts(count: int, tokens: int, of: Heads = LLAMA_8B) -> AttentionCase:
    return AttentionCase(f"prompts, {count} x {tokens}", ((0, tokens),) * count, of)


def attention_cases(tiny: bool) -> list[AttentionCase]:
    """All cases, the most important first."""
    if tiny:
        plain, some = decode(2, 20, TINY), prompts(2, 5, TINY)
        others = [variant(plain, "one layer a block", layers=1), one_long(40, 5, 2, TINY), swept(plain)]
        return [
            plain,
            variant(plain, "split layout", layout="split"),
            *others,
            *(prompt(5, 9, TINY), some, swept(some)),
        ]
    usual, long, gemma = decode(64, 1024), one_long(32_768, 128, 63), decode(64, 8192, GEMMA_3)
    gemma = variant(gemma, "Gemma 3 1B, window of 512")
    behind = prompt(32_768, 34_816)
    return [
        *(decode(rows, 1024) for rows in (1, 16, 64, 256)),
        long,
        *(prompt(0, 2048), behind, prompt(0, 8192), prompts(16, 128)),
        *(swept(each) for each in (usual, decode(16, 1024), long, behind)),
        variant(usual, "one layer a block", layers=1),
        *(decode(rows, tokens) for tokens in (128, 8192, 32_768) for rows in (1, 16, 64, 256)),
        variant(decode(16, 8192), "one layer a block", layers=1),
        variant(usual, "split layout", layout="split"),
        gemma,
    ]


def run(cases: Cases) -> None:
    times = _Times(cases)
    for number, each in enumerate(attention_cases(cases.tiny)):
        shown = number < _SHOWN_CASES and len(each.rows) > 1 and each.decodes and not each.swept
        line = f"{each.name} {{share of copy:.0%}}" if shown else None
        cases.run(each.name, partial(times.measure, each), seconds=0 if cases.tiny else _SECONDS, line=line)


class _Times:
    def __init__(self, cases: Cases) -> None:
        self._device = cases.device
        self._tiny = cases.tiny
        self._dtype = "float32" if cases.device == "cpu" else _DTYPE

    @cached_property
    def _copy_gb_per_s(self) -> float:
        return copy_gb_per_s(self._device, tiny=self._tiny)

    @torch.inference_mode()
    def measure(self, case: AttentionCase) -> Figures:
        copies = self._copy_gb_per_s
        pool, layers = self._pool(case)
        rounds = 1 if self._tiny else 15 if case.decodes else 7
        if case.swept:
            works = self._decode_ways(pool) if case.decodes else self._prompt_ways(pool)
            return {name: 1e3 * median_ms(work, self._device, rounds) for name, work in works.items()}
        work = self._decodes(pool) if case.decodes else self._prompts(pool)
        took_ms = median_ms(work, self._device, rounds)
        figures: dict[str, float | str] = {"us": 1e3 * took_ms, "layers a block": layers}
        if case.decodes:
            window = case.heads.window or max(end for _, end in case.rows)
            keys = sum(min(end, window) for _, end in case.rows)
            read = 2 * keys * case.heads.kv_heads * case.heads.dim * pool.dtype.itemsize
            figures |= {"GB/s": read / took_ms / 1e6, "share of copy": read / took_ms / 1e6 / copies}
        else:
            pairs = sum((end - first) * (first + end + 1) / 2 for first, end in case.rows)
            figures |= {"TFLOP/s": 4 * pairs * case.heads.heads * case.heads.dim / took_ms / 1e9}
        return figures

    def _pool(self, case: AttentionCase) -> tuple[Pool, int]:
        """A pool with as many layers per block as fit in memory."""
        free = _MEMORY_SHARE * free_bytes(self._device)
        layers = min(case.layers, int(free // pool_bytes(case.heads, case.rows, self._dtype, 1)))
        if layers < 1:
            raise SkipCase(f"it takes more than {free / 2**30:.0f} GiB")
        pool = Pool(case.heads, case.rows, self._dtype, self._device, layers=layers, layout=case.layout)
        pool.fill_with_numbers()
        return pool, layers

    def _decodes(self, pool: Pool, tuning: Tuning | None = None) -> Work:
        """Decodes without the planning of their work, which is done once for all layers."""
        inputs, kv = StepInputs.of(pool.batch(), pool.cache), pool.cache.layer(0)
        query = pool.random(pool.heads.heads, len(pool.rows), 0)
        work = plan_work(inputs.lengths, pool.heads.window, programs_of(query.device, kv.kv_heads))
        keys, num_warps, num_stages = tuning or (None, NUM_WARPS, NUM_STAGES)
        return recorded(
            lambda: attend_decodes(
                query,
                kv,
                inputs.tables,
                inputs.table_rows,
                work,
                scaling=None,
                softcap=pool.heads.softcap,
                keys=keys,
                num_warps=num_warps,
                num_stages=num_stages,
            ),
            self._device,
        )

    def _prompts(self, pool: Pool, shape: TileShape | None = None) -> Work:
        """Prompts whose keys and values are already in the pool."""
        inputs, kv = StepInputs.of(pool.batch(), pool.cache), pool.cache.layer(0)
        query = pool.random(pool.heads.heads, sum(end - first for first, end in pool.rows), 0)
        shape, prompts = shape or tile_shape(pool.heads.heads, kv), inputs.prompts
        tokens = shape.rows * kv.kv_heads // pool.heads.heads
        tiles = prompt_tiles(prompts, tokens, most_tiles(len(query), len(prompts), tokens))
        out, window, softcap = torch.empty_like(query), pool.heads.window, pool.heads.softcap
        return recorded(
            lambda: attend_prompts(
                query,
                kv,
                inputs.tables,
                tiles,
                scaling=None,
                window=window,
                softcap=softcap,
                out=out,
                shape=shape,
            ),
            self._device,
        )

    def _decode_ways(self, pool: Pool) -> dict[str, Work]:
        tunings = DECODE_TUNINGS[:2] if self._tiny else DECODE_TUNINGS
        return {
            f"us, {keys} keys, {num_warps} warps, {num_stages} stages": self._decodes(
                pool, (keys, num_warps, num_stages)
            )
            for keys, num_warps, num_stages in tunings
        }

    def _prompt_ways(self, pool: Pool) -> dict[str, Work]:
        shapes = PROMPT_SHAPES[:1] if self._tiny else PROMPT_SHAPES
        return {
            f"us, {shape.rows} rows, {shape.keys} keys, {shape.num_warps} warps, {shape.num_stages} stages": (
                self._prompts(pool, shape)
            )
            for shape in shapes
        }
