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
    """A time that is linear along each axis, so that interpolation is exact."""
    return 5.0 + 0.1 * chunk * (1 + context / 8) + 0.02 * decodes * length


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
