"""Served, a GGUF file gives what the folder of the same model gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import HandScheduler
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, PretrainedConfig

from gguf_files import TOKENS
from gguf_models import write_gguf_model
from shoal.models.conversion import convert

SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 12.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
LAYERS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (LlamaConfig(**SHAPE, rope_parameters=LLAMA3), 512),
        (LlamaConfig(**SHAPE, rope_parameters=YARN), 1024),
        (Phi3Config(**SHAPE, original_max_position_embeddings=320, rope_parameters=LONGROPE), 320),
        (Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 7}, head_dim=32, rope_parameters=LAYERS), 512),
    ],
    ids=["llama3", "yarn", "longrope", "gemma3"],
)
def test_a_gguf_file_is_served_as_its_folder(config: PretrainedConfig, context: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight * (1.0 if weight.ndim < 2 else 4.0)).bfloat16().float())
    model.save_pretrained(tmp_path / "own")
    write_gguf_model(model, tmp_path / "m.gguf")
    (tmp_path / "gguf").mkdir()
    assert convert.main(["gguf", str(tmp_path / "m.gguf"), str(tmp_path / "gguf")]) == 0
    scheduler = HandScheduler({name: tmp_path / name for name in ("own", "gguf")})
    assert [served.context_tokens for served in scheduler.models.services.values()] == [context, context]
    prompt = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    own, gguf = (scheduler.generate(name, [prompt, prompt[:9]], 12, chunk=64) for name in ("own", "gguf"))
    assert own == gguf
