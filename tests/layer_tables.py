"""A folder of layer times that are linear, so that every sum and interpolation of them is known."""

from itertools import product
from pathlib import Path

from shoal.forecast.model_spec import ModelSpec

MODEL = ModelSpec(
    name="tiny", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100
)
CHUNKS, CONTEXTS, DECODES, LENGTHS = (16, 32, 64), (0, 16, 64), (1, 2, 4), (16, 64, 256)
DENSE = {
    "embedding": (7.0, 0.5),
    "layernorm": (1.0, 0.25),
    "qkv_proj": (20.0, 2.0),
    "final_layernorm": (3.0, 1.0),
}
HEAD = {"lm_head": (50.0, 1.0), "sampler": (4.0, 0.5)}


def attention(chunk: int, context: int, decodes: int, length: int) -> float:
    """A time that is linear in the chunk's tokens, in how many positions these attend on average, in the
    decodes and in their context, so that interpolation is exact."""
    return 5.0 + 0.1 * chunk * (1 + (context + chunk / 2) / 8) + 0.02 * decodes * length


def write_profile(folder: Path, meta: str = "model: tiny\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.yaml").write_text(meta)
    dense = [f"{n},{t},{a + b * t}" for n, (a, b) in DENSE.items() for t in (1, 8, 128)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    head = [f"{n},{t},{a + b * t}" for n, (a, b) in HEAD.items() for t in (1, 16)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *head]))
    points = [(0, 0, n, k) for n, k in product(DECODES, LENGTHS)]
    points += [(c, p, 0, 0) for c, p in product(CHUNKS, CONTEXTS)]
    points += list(product(CHUNKS, CONTEXTS, DECODES, LENGTHS))
    rows = [",".join(map(str, (*point, attention(*point)))) for point in points]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *rows]))
    return folder


KEY_CHUNKS: dict[int, tuple[float, ...]] = {16: (16, 24, 81), 41: (16.5, 23.5, 81.5), 64: (16, 24, 36, 81)}
"""Keys measured with each number of prompt tokens: not the same, nor as many."""
NO_DECODES = 11.0
"""What a prompt without decodes saves: other kernels run."""


def attention_by_key(tokens: int, key: float, decodes: int, length: float) -> float:
    """A time that is linear along each axis but for the step from no decodes to one."""
    micros = 20.0 + 0.05 * tokens * key + 0.02 * decodes * length
    return micros if decodes else micros - NO_DECODES


def key_points() -> list[tuple[int, float, int, int]]:
    """Points of a table by key: of decodes alone, of prompts alone, of both."""
    points: list[tuple[int, float, int, int]] = [(0, 0.0, n, k) for n, k in product((*DECODES, 8), LENGTHS)]
    prompts = [(tokens, key) for tokens, keys in KEY_CHUNKS.items() for key in keys]
    points += [(tokens, key, 0, 0) for tokens, key in prompts]
    return points + [(*prompt, n, k) for prompt, n, k in product(prompts, DECODES, LENGTHS)]


def write_key_profile(folder: Path, meta: str = "model: tiny\n") -> Path:
    """A folder whose attention is measured by key, with rows of other lengths of a decode's queries."""
    write_profile(folder, meta)
    rows = [
        f"attention,{c},{key},{n},{k},{q},{attention_by_key(c, key, n, k) * q}"
        for c, key, n, k in key_points()
        for q in (1, 4)
    ]
    header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *rows]))
    return folder
