"""The part `times` of `benchmarks/gpu_check`: how long attention of one layer takes.

Blocks are those of a whole model, so that one layer's part of a block is as far from the next block's as
when serving; where that takes too much memory, fewer layers are in a block. Keys and values are read once:
their bytes by the time, as a share of what a copy on the device moves, say how far a kernel is from the best
possible.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from benchmarks.gpu_check.cases import Cases, Figures, LeftOut
from benchmarks.gpu_check.pool import Heads, Pool, Row, pool_bytes
from benchmarks.gpu_check.timing import Work, copy_gb_per_s, free_bytes, median_ms, recorded
from shoal.execute.attention.triton_backend import TritonStep
from shoal.execute.attention.triton_kernels import attend_decodes

LLAMA_8B = Heads("Llama 3.1 8B", 32, 8, 128)
GEMMA_3 = Heads("Gemma 3 1B", 4, 1, 256, window=512)
TINY = Heads("tiny", 2, 1, 16)
LAYERS = 32
_DTYPE = "bfloat16"
_MEMORY_SHARE = 0.7
_SECONDS = 2.0
_SAID = 6
"""So many of the first ones stand on the line of the part."""


@dataclass(frozen=True)
class Attended:
    """What one call attends. layers: of a block, at most."""

    name: str
    rows: tuple[Row, ...]
    heads: Heads = LLAMA_8B
    layers: int = LAYERS
    layout: str = "merged"


def decode(rows: int, tokens: int, of: Heads = LLAMA_8B) -> Attended:
    """Rows that decode behind as many tokens each."""
    return Attended(f"decode {rows} x {tokens}", ((tokens - 1, tokens),) * rows, of)


def beside(long: int, short: int, others: int, of: Heads = LLAMA_8B) -> Attended:
    """One long context and short ones."""
    rows = ((long - 1, long), *((short - 1, short),) * others)
    return Attended(f"decode 1 x {long} beside {others} x {short}", rows, of)


def varied(plain: Attended, what: str, **changes: object) -> Attended:
    """The same in another way."""
    return Attended(**{**vars(plain), "name": f"{plain.name}, {what}", **changes})


def prompt(first: int, end: int, of: Heads = LLAMA_8B) -> Attended:
    """A prompt, or a chunk of it."""
    return Attended(f"prompt, tokens {first} to {end}", ((first, end),), of)


def attended(tiny: bool) -> list[Attended]:
    """All that is timed; what says most comes first."""
    if tiny:
        plain = decode(2, 20, TINY)
        others = [varied(plain, "one layer a block", layers=1), beside(40, 5, 2, TINY), prompt(5, 9, TINY)]
        return [plain, varied(plain, "split layout", layout="split"), *others]
    usual = decode(64, 1024)
    return [
        *(decode(rows, 1024) for rows in (1, 16, 64, 256)),
        varied(usual, "one layer a block", layers=1),
        beside(32_768, 128, 63),
        *(prompt(first, end) for first, end in ((0, 2048), (32_768, 34_816), (0, 8192))),
        *(decode(rows, tokens) for tokens in (128, 8192, 32_768) for rows in (1, 16, 64, 256)),
        varied(decode(16, 8192), "one layer a block", layers=1),
        varied(usual, "split layout", layout="split"),
        varied(decode(64, 8192), "Gemma 3 1B, window of 512", heads=GEMMA_3),
    ]


def run(cases: Cases) -> None:
    times = _Times(cases)
    for number, each in enumerate(attended(cases.tiny)):
        line = f"{each.name} {{share of copy:.0%}}" if len(each.rows) > 1 and number < _SAID else None
        cases.run(each.name, partial(times.measure, each), seconds=0 if cases.tiny else _SECONDS, line=line)


class _Times:
    def __init__(self, cases: Cases) -> None:
        self._device = cases.device
        self._tiny = cases.tiny
        self._dtype = "float32" if cases.device == "cpu" else _DTYPE

    @cached_property
    def _copies(self) -> float:
        """GB a second that a copy reads and writes."""
        return copy_gb_per_s(self._device, tiny=self._tiny)

    @torch.inference_mode()
    def measure(self, what: Attended) -> Figures:
        copies = self._copies
        pool, layers = self._pool(what)
        decodes = all(end - first == 1 for first, end in what.rows)
        work = self._decodes(pool) if decodes else self._prompts(pool)
        took_ms = median_ms(work, self._device, 1 if self._tiny else 15 if decodes else 7)
        figures: dict[str, float | str] = {"us": 1e3 * took_ms, "layers a block": layers}
        if decodes:
            window = what.heads.window or max(end for _, end in what.rows)
            keys = sum(min(end, window) for _, end in what.rows)
            read = 2 * keys * what.heads.kv_heads * what.heads.dim * pool.dtype.itemsize
            figures |= {"GB/s": read / took_ms / 1e6, "share of copy": read / took_ms / 1e6 / copies}
        else:
            [(first, end)] = what.rows
            pairs = (end - first) * (first + end + 1) / 2
            figures |= {"TFLOP/s": 4 * pairs * what.heads.heads * what.heads.dim / took_ms / 1e9}
        return figures

    def _pool(self, what: Attended) -> tuple[Pool, int]:
        """A pool with as many layers in a block as there is memory for."""
        free = _MEMORY_SHARE * free_bytes(self._device)
        layers = min(what.layers, int(free // pool_bytes(what.heads, what.rows, self._dtype, 1)))
        if layers < 1:
            raise LeftOut(f"it takes more than {free / 2**30:.0f} GiB")
        pool = Pool(what.heads, what.rows, self._dtype, self._device, layers=layers, layout=what.layout)
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
        step = TritonStep(pool.batch(), pool.cache)
        [(first, end)] = pool.rows
        query, key, value = (
            pool.random(heads, end - first, seed)
            for seed, heads in enumerate((pool.heads.heads, pool.heads.kv_heads, pool.heads.kv_heads))
        )
        return lambda: pool.attend(step, 0, query, key, value)
