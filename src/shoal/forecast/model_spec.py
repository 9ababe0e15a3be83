"""Model shapes (layers, heads, experts) by name or ``config.json``; sizes of weights and KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.core import ConfigError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer; raises ConfigError for inconsistent numbers."""

    name: str
    """In lower case, or the name in a configuration."""
    layers: int
    hidden: int
    """Size of the hidden state."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Equal to ``heads`` without grouping."""
    head_dim: int
    intermediate: int
    """Inner size of the MLP, or of one expert."""
    vocab: int
    gated: bool = True
    """Whether the MLP has a gate: three matrices, not two."""
    weight_bytes_each: float = 2.0
    """Bytes per weight."""
    kv_bytes_each: float = 2.0
    """Bytes per number in the KV cache."""
    experts: int = 0
    """0 in dense models."""
    experts_per_token: int = 0
    """0 in dense models."""
    tied: bool = False
    """Whether the output head shares the embedding's weights."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"model {self.name}: {field} must be at least 1, got {getattr(self, field)}"
                )
        if self.heads % self.kv_heads:
            raise ConfigError(f"model {self.name}: {self.heads} heads cannot share {self.kv_heads} KV heads")
        if not 0 <= self.experts_per_token <= self.experts or (self.experts > 0) != (
            self.experts_per_token > 0
        ):
            raise ConfigError(
                f"model {self.name}: experts_per_token must be between 1 and the {self.experts} experts, got "
                f"{self.experts_per_token}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str | None = None) -> "ModelSpec":
        """From a Hugging Face ``config.json``; raises a ConfigError that names missing keys."""
        config = {**config, **config.get("text_config", {})}
        title = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
        kind = str(config.get("model_type", ""))
        hidden = _first(config, title, "hidden_size", "n_embd")
        heads = _first(config, title, "num_attention_heads", "n_head")
        intermediate = config.get("moe_intermediate_size") or config.get("intermediate_size")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        return cls(
            name=title,
            layers=_first(config, title, "num_hidden_layers", "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or config.get("multi_query_group_num") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=int(intermediate or config.get("ffn_dim") or config.get("n_inner") or 4 * hidden),
            vocab=_first(config, title, "vocab_size", "padded_vocab_size"),
            gated=kind not in _UNGATED,
            weight_bytes_each=_BYTES.get(dtype, 2),
            kv_bytes_each=_BYTES.get(dtype, 2),
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
            tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        )

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of one layer's MLP, with all experts and the router."""
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        return self.experts * (mlp + self.hidden) if self.experts else mlp

    @property
    def parameters(self) -> int:
        """Weights of all matrices; norms and biases, far below 1%, are not counted."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.attention_weights + self.mlp_weights) + embeddings

    def weight_bytes(self, tp: int = 1, ranks: int = 1) -> int:
        """Bytes of weights on each of ``tp`` devices; every matrix is split evenly.

        ranks: data-parallel ranks that share the experts, and replicate all other weights.
        """
        elsewhere = self.layers * self.mlp_weights * (ranks - 1) / ranks if self.experts else 0.0
        return -(-int((self.parameters - elsewhere) * self.weight_bytes_each) // tp)

    def kv_heads_on(self, tp: int) -> int:
        """KV heads on each of ``tp`` devices; with more devices than heads, heads are replicated."""
        return max(1, -(-self.kv_heads // tp))

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes of one token's KV in all layers, on each of ``tp`` devices."""
        return int(2 * self.layers * self.kv_heads_on(tp) * self.head_dim * self.kv_bytes_each)


_UNGATED = frozenset({"opt", "gptj", "gpt2", "gpt_neox", "bloom", "falcon", "phi", "codegen"})
_TIED = frozenset({"opt", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "bloom"})


def _first(config: Mapping[str, Any], title: str, *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ConfigError(f"the configuration of {title} has none of {', '.join(names)}")


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=mlp,
        vocab=vocab,
    )


def _opt(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 50_272, tied: bool = True
) -> ModelSpec:
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        vocab=vocab,
        gated=False,
        tied=tied,
    )


_SPECS = [
    _llama("llama-7b", 32, 4096, 32, 32, 11_008, 32_000),
    _llama("llama-13b", 40, 5120, 40, 40, 13_824, 32_000),
    _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13_824, 32_000),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28_672, 32_000),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28_672, 128_256),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14_336, 128_256),
    _llama("llama-3.1-70b", 80, 8192, 64, 8, 28_672, 128_256),
    _llama("vicuna-7b", 32, 4096, 32, 32, 11_008, 32_000),
    _llama("vicuna-13b", 40, 5120, 40, 40, 13_824, 32_000),
    _llama("mistral-7b", 32, 4096, 32, 8, 14_336, 32_000),
    _llama("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064),
    _llama("qwen2.5-14b", 48, 5120, 40, 8, 13_824, 152_064),
    _llama("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064),
    _llama("qwen2.5-72b", 80, 8192, 64, 8, 29_568, 152_064),
    _llama("qwen3-8b", 36, 4096, 32, 8, 12_288, 151_936),
    _llama("chatglm2-6b", 28, 4096, 32, 2, 13_696, 65_024),
    _llama("chatglm3-6b", 28, 4096, 32, 2, 13_696, 65_024),
    ModelSpec(
        name="qwen3-32b",
        layers=64,
        hidden=5120,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25_600,
        vocab=151_936,
    ),
    ModelSpec(
        name="qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=768,
        vocab=151_936,
        experts=128,
        experts_per_token=8,
    ),
    ModelSpec(
        name="mixtral-8x7b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14_336,
        vocab=32_000,
        experts=8,
        experts_per_token=2,
    ),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("gpt-j-6b", 28, 4096, 16, vocab=50_400, tied=False),
    _opt("bloom-176b", 70, 14_336, 112, vocab=250_880),
    ModelSpec(
        name="smollm2-135m",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49_152,
        tied=True,
    ),
    ModelSpec(
        name="gemma3-270m",
        layers=18,
        hidden=640,
        heads=4,
        kv_heads=1,
        head_dim=256,
        intermediate=2048,
        vocab=262_144,
        tied=True,
    ),
]

MODEL_SPECS: Mapping[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
"""By name; weights and KV have two bytes per number."""


_ALIASES = {"smollm2": "smollm2-135m"}
"""Other names of models in ``MODEL_SPECS``."""


def find_model_spec(name: str) -> ModelSpec | None:
    """The model called ``name``, ignoring case, owner and suffixes such as ``-Instruct``; None if unknown."""
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    short = _ALIASES.get(short, short)
    known = [key for key in MODEL_SPECS if short == key or short.startswith(key + "-")]
    return MODEL_SPECS[max(known, key=len)] if known else None


def model_spec(name: str) -> ModelSpec:
    """As ``find_model_spec``, but raises a ConfigError that lists similar names if unknown."""
    spec = find_model_spec(name)
    if spec is None:
        near = get_close_matches(name.lower(), MODEL_SPECS, n=3, cutoff=0.4)
        known = f"near are {', '.join(near)}" if near else f"on record are {', '.join(sorted(MODEL_SPECS))}"
        raise ConfigError(
            f"model {name!r} has no shape on record; {known}; any other can be read from its config.json"
        )
    return spec
