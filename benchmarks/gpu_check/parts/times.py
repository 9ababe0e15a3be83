"""GPU check, part `times`: times of one layer's attention, relative to the copy bandwidth.

Blocks have all layers of a model, for the strides of real serving; fewer if memory is short. Keys and values
are read once, so their bytes per second, relative to those of a copy, show how close a kernel is to optimal.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase
from benchmarks.gpu_check.pool import Heads, Pool, Row, pool_bytes
from benchmarks.gpu_check.timing import Work, copy_gb_per_s, free_bytes, median_ms, recorded
from shoal.execute.attention.triton_backend import TritonAttention
from shoal.execute.attention.triton_kernels import attend_decodes

LLAMA_8B = Heads("Llama 3.1 8B", 32, 8, 128)
GEMMA_3 = Heads("Gemma 3 1B", 4, 1, 256, window=512)
TINY = Heads("tiny", 2, 1, 16)
LAYERS = 32
_DTYPE = "bfloat16"
_MEMORY_SHARE = 0.7
_SECONDS = 2.0
_SHOWN_CASES = 6
"""Number of cases on the part's line."""


@dataclass(frozen=True)
class AttentionCase:
    """One timed attention call. layers: of a block, at most."""

    name: str
    rows: tuple[Row, ...]
    heads: Heads = LLAMA_8B
    layers: int = LAYERS
    layout: str = "merged"


def decode(rows: int, tokens: int, of: Heads = LLAMA_8B) -> AttentionCase:
    return AttentionCase(f"decode {rows} x {tokens}", ((tokens - 1, tokens),) * rows, of)


def one_long(long: int, short: int, others: int, of: Heads = LLAMA_8B) -> AttentionCase:
    rows = ((long - 1, long), *((short - 1, short),) * others)
    return AttentionCase(f"decode 1 x {long} beside {others} x {short}", rows, of)


def variant(plain: AttentionCase, change: str, **changes: object) -> AttentionCase:
    return AttentionCase(**{**vars(plain), "name": f"{plain.name}, {change}", **changes})


def prompt(first: int, end: int, of: Heads = LLAMA_8B) -> AttentionCase:
    return AttentionCase(f"prompt, tokens {first} to {end}", ((first, end),), of)


def attention_cases(tiny: bool) -> list[AttentionCase]:
    """All cases, the most important first."""
    if tiny:
        plain = decode(2, 20, TINY)
        others = [variant(plain, "one layer a block", layers=1), one_long(40, 5, 2, TINY), prompt(5, 9, TINY)]
        return [plain, variant(plain, "split layout", layout="split"), *others]
    usual = decode(64, 1024)
    return [
        *(decode(rows, 1024) for rows in (1, 16, 64, 256)),
        variant(usual, "one layer a block", layers=1),
        one_long(32_768, 128, 63),
        *(prompt(first, end) for first, end in ((0, 2048), (32_768, 34_816), (0, 8192))),
        *(decode(rows, tokens) for tokens in (128, 8192, 32_768) for rows in (1, 16, 64, 256)),
        variant(decode(16, 8192), "one layer a block", layers=1),
        variant(usual, "split layout", layout="split"),
        variant(decode(64, 8192), "Gemma 3 1B, window of 512", heads=GEMMA_3),
    ]


def run(cases: Cases) -> None:
    times = _Times(cases)
    for number, each in enumerate(attention_cases(cases.tiny)):
        line = f"{each.name} {{share of copy:.0%}}" if len(each.rows) > 1 and number < _SHOWN_CASES else None
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
        decodes = all(end - first == 1 for first, end in case.rows)
        work = self._decodes(pool) if decodes else self._prompts(pool)
        took_ms = median_ms(work, self._device, 1 if self._tiny else 15 if decodes else 7)
        figures: dict[str, float | str] = {"us": 1e3 * took_ms, "layers a block": layers}
        if decodes:
            window = case.heads.window or max(end for _, end in case.rows)
            keys = sum(min(end, window) for _, end in case.rows)
            read = 2 * keys * case.heads.kv_heads * case.heads.dim * pool.dtype.itemsize
            figures |= {"GB/s": read / took_ms / 1e6, "share of copy": read / took_ms / 1e6 / copies}
        else:
            [(first, end)] = case.rows
            pairs = (end - first) * (first + end + 1) / 2
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

    def _decodes(self, pool: Pool) -> Work:
        batch, cache = pool.batch(), pool.cache
        query = pool.random(pool.heads.heads, len(pool.rows), 0)
        tables = torch.from_numpy(cache.entries(batch.tables).astype(np.int32)).to(self._device)
        lengths = torch.from_numpy(batch.ends.astype(np.int32)).to(self._device)
        kv, window, softcap = cache.layer(0), pool.heads.window, pool.heads.softcap
        return recorded(
            lambda: attend_decodes(query, kv, tables, lengths, None, window, softcap), self._device
        )

    def _prompts(self, pool: Pool) -> Work:
        step = TritonAttention(pool.batch(), pool.cache)
        [(first, end)] = pool.rows
        query, key, value = (
            pool.random(heads, end - first, seed)
            for seed, heads in enumerate((pool.heads.heads, pool.heads.kv_heads, pool.heads.kv_heads))
        )
        return lambda: pool.attend(step, 0, query, key, value)
