"""Builders for tests of simulated engines: a model that is a config.json alone, and step times."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from shoal.core import Service
from shoal.engine import EngineOptions
from shoal.engine.options import SIMULATED
from shoal.forecast import LatencyModel, LatencyProfile, save_profile
from shoal.forecast.latency_sources import EngineLatency, FitLatency
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions, WeightsOptions

VOCABULARY, EOS = 200, 7
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def make_folder(folder: Path, **changes: Any) -> Path:
    """A model's folder without tokenizer and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def add_tokenizer(folder: Path) -> list[int]:
    """Give a model's folder a tokenizer of bytes and 300 words; returns the ids of the words."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    pieces = [*letters, *(f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(300))]
    ends = [tokenizers.AddedToken("<end>", special=True), tokenizers.AddedToken("<start>", special=True)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(ends)
    backend.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<end>", "bos_token": "<start>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    make_folder(folder, vocab_size=len(pieces) + 2, eos_token_id=len(pieces))
    return list(range(len(letters), len(pieces)))


def constant_times(folder: Path, step_s: float) -> FitLatency:
    """Step times of a file of ``shoal profile``: every step takes as long."""
    file = folder / f"{step_s}.json"
    model = LatencyModel(constant_s=step_s, sequence_s=0, token_s=0, context_s=0, work_s=0)
    save_profile(LatencyProfile(device="cpu", threads=1, models={("any", 1): model}), file)
    return FitLatency(fit=file)


def simulated_options(
    folder: Path,
    *names: str,
    step_s: float = 1e-6,
    kv: dict[str, Any] | None = None,
    weights: WeightsOptions | None = None,
    latency: EngineLatency | None = None,
    **scheduler: Any,
) -> EngineOptions:
    """Options of an engine with services ``names``, by default one; step times are written to ``folder``."""
    return EngineOptions(
        services=tuple(Service(name=name, model=name, weights="random") for name in names or ("a",)),
        device=SIMULATED,
        latency=latency or EngineLatency(default=constant_times(folder, step_s)),
        kv_cache=KVCacheOptions(**{"memory_bytes": 4 << 20, "block_size": 4} | (kv or {})),
        scheduler=SchedulerOptions(**scheduler),
        weights=weights or WeightsOptions(),
    )
