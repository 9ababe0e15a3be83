"""Tiny GGUF files."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

LAYERS = 2
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "ĠĠ", "<|end|>"]


def write_tiny_llama(
    file: Path,
    *,
    hidden: int = 16,
    inner: int = 32,
    kv_heads: int = 4,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    dense: str | None = None,
    without: str | None = None,
    layers: int = LAYERS,
    architecture: str = "llama",
) -> dict[str, np.ndarray]:
    """A llama with four heads and random weights; returns these, its matrices as ``kind`` stores them.

    dense: a matrix to store in float32 whatever the kind. without: a weight to leave out. layers: how many
    the file says it has. architecture: what it says it is.
    """
    writer = _writer(file, architecture, layers, hidden, inner)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    return _write(writer, _shapes(hidden, inner, kv_heads), kind, dense, without)


def write_tiny_gpt2(file: Path, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """A GPT-2 with random weights, of which this returns the matrices as ``kind`` stores them."""
    hidden, inner = 64, 256
    writer = _writer(file, "gpt2", LAYERS, hidden, inner)
    writer.add_layer_norm_eps(1e-5)
    outputs = {"attn_qkv": 3 * hidden, "attn_output": hidden, "ffn_up": inner, "ffn_down": hidden}
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        for name, count in outputs.items():
            shapes[f"blk.{i}.{name}.weight"] = (count, inner if name == "ffn_down" else hidden)
            shapes[f"blk.{i}.{name}.bias"] = (count,)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    shapes |= {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}
    shapes |= {"token_embd.weight": (len(TOKENS), hidden), "position_embd.weight": (1024, hidden)}
    return _write(writer, shapes, kind, "position_embd.weight")


def _writer(file: Path, architecture: str, layers: int, hidden: int, inner: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    add_tokenizer(writer, TOKENS)
    return writer


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """A tokenizer of bytes, whose last token ends everything."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ġ a", "Ġ Ġ"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_vocab_size(len(tokens))


def _write(
    writer: gguf.GGUFWriter,
    shapes: dict[str, tuple[int, ...]],
    kind: GGMLQuantizationType,
    dense: str | None,
    without: str | None = None,
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape).astype(np.float32)
        stored = kind if weight.ndim == 2 and name != dense else GGMLQuantizationType.F32
        if stored != GGMLQuantizationType.F32:
            weight = gguf.quantize(weight, stored)
        weights[name] = weight
        if name != without:
            writer.add_tensor(name, weight, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _shapes(hidden: int, inner: int, kv_heads: int) -> dict[str, tuple[int, ...]]:
    keys = hidden * kv_heads // 4
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(LAYERS):
        block = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "ffn_down": (hidden, inner)}
        block |= dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden))
        block |= dict.fromkeys(("attn_q", "attn_output"), (hidden, hidden))
        block |= dict.fromkeys(("attn_k", "attn_v"), (keys, hidden))
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes
