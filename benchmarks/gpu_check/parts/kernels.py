"""GPU check, part `kernels`: attention of the backend `triton` compared with the reference.

Unwritten parts of the KV pool are NaN.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase
from benchmarks.gpu_check.pool import Heads, Pool, Row, pool_bytes
from benchmarks.gpu_check.timing import free_bytes, wait
from shoal.execute.attention.torch_backends import ReferenceAttention
from shoal.execute.gpu.step import TritonAttention

DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 4e-2}
"""Largest absolute error; outputs are about 1."""
SHAPES = (
    Heads("Llama 3.2 1B", 32, 8, 64),
    Heads("Llama 3.1 8B", 32, 8, 128),
    Heads("Qwen 2.5 7B", 28, 4, 128),
    Heads("Gemma 2 2B", 8, 4, 256, window=4096, softcap=50.0),
    Heads("Gemma 3 270M", 4, 1, 256, window=512),
    Heads("SmolLM2 135M", 9, 3, 64),
)
DECODES = (2049, 700, 513, 512, 130, 65, 64, 63, 33, 32, 31, 17, 16, 15, 2, 1)
PROMPTS: tuple[Row, ...] = ((0, 64), (0, 65), (0, 97), (33, 65), (100, 700), (600, 665))
TINY_SHAPES = (Heads("tiny, group of 3", 3, 1, 16), Heads("tiny, windows", 4, 2, 20, window=5, softcap=2.0))
TINY_DECODES, TINY_PROMPTS = (18, 1), ((0, 9), (3, 9))
LARGE_BYTES = (2 << 31) + (512 << 20)
"""In two-byte dtypes all blocks are then after 2^31 elements."""
_SHARPNESS = 3.0
"""Factor of the queries, so that single keys matter."""
_LAYERS = 2


def run(cases: Cases) -> None:
    shapes = TINY_SHAPES if cases.tiny else SHAPES
    decodes, prompts = (TINY_DECODES, TINY_PROMPTS) if cases.tiny else (DECODES, PROMPTS)
    rows = [*((end - 1, end) for end in decodes), *prompts]
    dtypes = DTYPES[1:] if cases.device == "cpu" else DTYPES  # Triton's interpreter has no bfloat16
    # Bytes before all blocks.
    large = 1 << 20 if cases.tiny else LARGE_BYTES
    for dtype in dtypes:
        for heads in shapes:
            cases.run(f"{heads.name}, {dtype}", partial(compare, cases.device, heads, rows, dtype))
        if dtype == dtypes[0]:
            for layout, behind in (("split", 0), ("merged", large), ("split", large)):
                name = f"{heads.name}, {dtype}, {layout} layout, behind {behind / 2**30:.3g} GiB"
                line = f"{layout} behind {behind / 2**30:.3g} GiB ok" if behind else None
                compared = partial(compare, cases.device, heads, rows, dtype, layout, behind)
                cases.run(name, compared, line=line)


def compare(
    device: str,
    heads: Heads,
    rows: Sequence[Row],
    dtype: str,
    layout: str = "merged",
    spare_bytes: int = 0,
) -> Figures:
    """Compute one step over all rows with both; raises AssertionError if they differ."""
    needed, free = pool_bytes(heads, rows, dtype, _LAYERS) + spare_bytes, free_bytes(device)
    if needed > free:
        raise SkipCase(f"{needed / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} are free")
    pool = Pool(heads, rows, dtype, device, layers=_LAYERS, layout=layout, spare_bytes=spare_bytes)
    pool.fill_with_nan()
    ends = [end for _, end in rows]
    keys = torch.split(pool.random(heads.kv_heads, sum(ends), 1), ends)
    values = torch.split(pool.random(heads.kv_heads, sum(ends), 2), ends)
    pool.store(1, keys, values)
    key, value = (
        torch.cat([one[first:] for one, (first, _) in zip(each, rows, strict=True)])
        for each in (keys, values)
    )
    query = pool.random(heads.heads, len(key), 3) * _SHARPNESS
    batch = pool.batch()
    with torch.inference_mode():
        wait(device)
        started = time.perf_counter()
        out = pool.attend(TritonAttention(batch, pool.cache), 1, query, key, value)
        wait(device)
        first_s = time.perf_counter() - started
        # Second, so that it does not hide missing writes of the first.
        expected = pool.attend(ReferenceAttention(batch, pool.cache), 1, query, key, value)
    errors = (out.double() - expected.double()).abs().flatten(1).max(1).values.nan_to_num(torch.inf)
    decodes, prompts = errors[: batch.num_decodes], errors[batch.num_decodes :]
    if not float(errors.max()) <= TOLERANCE[dtype]:
        raise AssertionError(_describe(batch.starts.tolist(), rows, errors, TOLERANCE[dtype]))
    return {
        "decodes, largest error": float(decodes.max()),
        "prompts, largest error": float(prompts.max()),
        "first call, s": first_s,
    }


def _describe(starts: Sequence[int], rows: Sequence[Row], errors: torch.Tensor, tolerance: float) -> str:
    wrong = []
    for (first, end), begin, stop in zip(rows, starts, starts[1:], strict=False):
        error = float(errors[begin:stop].max())
        if error > tolerance:
            wrong.append(f"tokens {first} to {end} by {error:.2g}")
    return f"{len(wrong)} of {len(rows)} rows differ: {', '.join(wrong)}"
