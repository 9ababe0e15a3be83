"""Llama model shapes for the parts of `benchmarks.gpu_check` that run models.

The vocabulary is smaller than the originals', as in other figures of docs/benchmarks.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 49_152
BLOCK = 16
_ITEM_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Llama:
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    tied: bool
    context: int = 131_072

    def write(self, folder: Path) -> Path:
        """Write config.json into a new folder in ``folder``."""
        made = folder / self.name
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").write_text(json.dumps(self.config()))
        return made

    def config(self) -> Mapping[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": self.tied,
            "vocab_size": VOCABULARY,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }

    @property
    def read_bytes(self) -> int:
        """Weight bytes that a step reads: all except untied embeddings."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return _ITEM_BYTES * (self.layers * layer + VOCABULARY * self.hidden + self.hidden)

    @property
    def weight_bytes(self) -> int:
        return self.read_bytes + (0 if self.tied else _ITEM_BYTES * VOCABULARY * self.hidden)

    def kv_bytes(self, sequences: int, tokens: int) -> int:
        """KV bytes of sequences of ``tokens`` tokens, with a spare block each."""
        token_bytes = 2 * _ITEM_BYTES * self.layers * self.kv_heads * self.dim
        return sequences * (tokens + 2 * BLOCK) * token_bytes


LLAMA_1B = Llama(
    name="Llama-1B", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, dim=64, tied=True
)
LLAMA_3B = Llama(
    name="Llama-3B", layers=28, hidden=3072, intermediate=8192, heads=24, kv_heads=8, dim=128, tied=True
)
LLAMA_8B = Llama(
    name="Llama-8B", layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, dim=128, tied=False
)
TINY = tuple(
    Llama(name=name, layers=2, hidden=32, intermediate=64, heads=4, kv_heads=2, dim=8, tied=name != "tiny-b")
    for name in ("tiny-a", "tiny-b", "tiny-c")
)  # fmt: skip
