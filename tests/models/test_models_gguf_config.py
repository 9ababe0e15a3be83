"""A GGUF file gives the model that its folder gives: all that moves positions or scales anything is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from gguf_files import TOKENS, write_tiny_llama
from gguf_models import write_gguf_model
from shoal.core import ModelUnsupported
from shoal.models.conversion import convert
from shoal.models.gguf.config import ARCHITECTURES, transformers_config
from shoal.models.gguf.file import GgufFile
from shoal.models.gguf.rope import rope_parameters

TOKENS_COMPARED = 300
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 258,
    "eos_token_id": 258,
    "pad_token_id": None,
}
GEMMA = {**SHAPE, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 256}
EXPERTS = {**SHAPE, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 12.0], "original_max_position_embeddings": 128,
}  # fmt: skip


THREE = [*(["sliding_attention", "sliding_attention", "full_attention"] * 2), "sliding_attention"]


def rope(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**values, **more}}


CASES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, **rope({"rope_theta": 5000.0})),
    "llama-head_dim-biases": LlamaConfig(**SHAPE, head_dim=32, attention_bias=True, mlp_bias=True),
    "llama-llama3": LlamaConfig(**SHAPE, **rope(LLAMA3)),
    "llama-linear": LlamaConfig(**SHAPE, **rope(LINEAR)),
    "llama-yarn": LlamaConfig(**SHAPE, **rope(YARN)),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, head_dim=16, sliding_window=19),
    "qwen2": Qwen2Config(**SHAPE, **rope({"rope_theta": 1e6})),
    "qwen2-yarn": Qwen2Config(**SHAPE, **rope(YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0)),
    "qwen2-window": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=19, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-yarn": Qwen3Config(**SHAPE, head_dim=32, **rope(YARN)),
    "qwen2moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=48),
    "qwen3moe": Qwen3MoeConfig(**EXPERTS, head_dim=32, norm_topk_prob=True),
    "phi3": Phi3Config(**SHAPE, sliding_window=None),
    "phi3-window": Phi3Config(**SHAPE, sliding_window=19),
    "phi3-longrope-partial": Phi3Config(
        **SHAPE, original_max_position_embeddings=128, **rope(LONGROPE, partial_rotary_factor=0.75)
    ),
    "stablelm": StableLmConfig(**SHAPE, use_qkv_bias=True, **rope({}, partial_rotary_factor=0.25)),
    "stablelm-parallel": StableLmConfig(
        **SHAPE, use_parallel_residual=True, **rope({}, partial_rotary_factor=0.5)
    ),
    "gpt2": GPT2Config(
        vocab_size=len(TOKENS), n_embd=64, n_layer=2, n_head=4, n_positions=320, n_inner=96
    ),
    "starcoder2": Starcoder2Config(**SHAPE, **rope({"rope_theta": 999999.0})),
    "starcoder2-linear": Starcoder2Config(**SHAPE, use_bias=False, **rope(LINEAR)),
    "starcoder2-window": Starcoder2Config(**SHAPE, sliding_window=19),
    "gemma2": Gemma2Config(**GEMMA, sliding_window=19),
    "gemma2-caps": Gemma2Config(
        **GEMMA, sliding_window=19, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma2-pattern": Gemma2Config(
        **GEMMA, sliding_window=19, layer_types=THREE,
    ),
    "gemma3": Gemma3TextConfig(**GEMMA, sliding_window=19),
    "gemma3-linear": Gemma3TextConfig(
        **GEMMA,
        sliding_window=19,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3-yarn": Gemma3TextConfig(
        **GEMMA,
        sliding_window=19,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    ),
    "minimax-m2": MiniMaxM2Config(
        **SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8
    ),
}  # fmt: skip


WINDOWS = {"attention.sliding_window": 19}
KEYS: dict[str, dict[str, Any]] = {
    "mistral-window": WINDOWS,
    "starcoder2-window": WINDOWS,
    "qwen2-window": {**WINDOWS, "attention.sliding_window_pattern": [False, True]},
    "gemma2-pattern": {"attention.sliding_window_pattern": 3},
    "gemma3-yarn": {"rope.freq_base_swa": 777.0},
}
"""Keys that the converter does not write, or not for these values."""
DEFAULT = (
    "llama-llama3",
    "mistral-window",
    "qwen2-yarn",
    "phi3-longrope-partial",
    "starcoder2",
    "gemma3-linear",
)
"""Tried in every run of the tests."""


def random_model(config: PretrainedConfig) -> Any:
    """With weights in float32 that bfloat16 has, large enough that attention matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.ndim < 2:  # norms and biases are all alike otherwise
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.mul_(1.0 if "embed" in name or "wte" in name else 4.0)
            weight.copy_(weight.bfloat16().float())
    return model


@torch.inference_mode()
def log_probabilities(model: Any) -> torch.Tensor:
    ids = torch.randint(0, len(TOKENS), (1, TOKENS_COMPARED), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0].log_softmax(dim=-1)


def converted(file: Path, folder: Path) -> Any:
    folder.mkdir()
    assert convert.main(["gguf", str(file), str(folder)]) == 0
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_file_gives_the_log_probabilities_of_its_folder(case: str, tmp_path: Path) -> None:
    model = random_model(CASES[case])
    write_gguf_model(model, tmp_path / "m.gguf", keys=KEYS.get(case))
    found = converted(tmp_path / "m.gguf", tmp_path / "folder")
    torch.testing.assert_close(log_probabilities(found), log_probabilities(model), rtol=0, atol=2e-4)


def test_every_architecture_is_tried() -> None:
    tried = {"minimax-m2" if case == "minimax-m2" else case.partition("-")[0] for case in CASES}
    assert tried - {"mistral"} == ARCHITECTURES.keys()


def config_of(
    folder: Path, case: str, keys: dict[str, Any] | None = None, lacks: tuple[str, ...] = ()
) -> dict[str, Any]:
    write_gguf_model(random_model(CASES[case]), folder / "m.gguf", keys=keys, lacks=lacks)
    return transformers_config(GgufFile(GGUFReader(folder / "m.gguf")))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("llama", {"brand_new": 1}),
        ("llama", {"logit_scale": 0.5}),
        ("llama", {"residual_scale": 0.5}),
        ("llama", {"embedding_scale": 12.0}),
        ("llama", {"attention.scale": 0.5}),
        ("llama", {"attention.causal": False}),
        ("llama", {"attention.head_count_kv": [2, 1]}),
        ("llama", {"attention.value_length": 8}),
        ("llama", {"attention.sliding_window": 19, "attention.sliding_window_pattern": [True, False]}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"expert_count": 8, "expert_used_count": 2}),
        ("llama", {"rope.dimension_count": 8}),
        ("llama", {"rope.dimension_sections": [2, 3, 3, 0]}),
        ("llama", {"rope.freq_base_swa": 500.0}),
        ("llama", {"pooling_type": 1}),
        ("llama-yarn", {"rope.scaling.yarn_log_multiplier": 0.1}),
        ("llama-yarn", {"rope.scaling.yarn_ext_factor": 0.5}),
        ("llama-head_dim-biases", {"attention.sliding_window": 19}),
        ("qwen2", {"attention.sliding_window": 19}),
        ("qwen3moe", {"expert_gating_func": 2}),
        ("qwen3moe", {"expert_weights_scale": 2.5}),
        ("qwen3moe", {"leading_dense_block_count": 1}),
        ("phi3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
        ("starcoder2", {"attention.key_length": 32, "attention.value_length": 32}),
        ("gemma3", {"attention.sliding_window_pattern": [True, False]}),
    ],
    ids=str,
)
def test_an_unsupported_key_is_refused_by_name(case: str, keys: dict[str, Any], tmp_path: Path) -> None:
    named = "|".join(key.replace(".", r"\.") for key in keys)
    with pytest.raises(ModelUnsupported, match=rf"key \w+\.({named}) = .*original folder"):
        config_of(tmp_path, case, keys)


@pytest.mark.parametrize(
    ("case", "keys", "named"),
    [
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type longrope"),
        ("llama", {"rope.scaling.type": "ntk"}, "rope.scaling.type ntk"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, "an attn_factor of 1.5"),
        ("llama-llama3", {"rope.scaling.type": "yarn"}, "rope_freqs.weight"),
        ("phi3-longrope-partial", {"rope.scaling.factor": 2.0}, "rope_factors_long.weight"),
        ("phi3-longrope-partial", {"rope.dimension_count": 8}, "is not of 4 numbers"),
    ],
    ids=str,
)
def test_scalings_that_transformers_lacks_are_refused(
    case: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(named)):
        config_of(tmp_path, case, keys)


def test_keys_without_effect_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0, "attention.causal": True,
        "pooling_type": 3, "rope.scaling.finetuned": False, "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.0, "attention.sliding_window": 0, "attention.head_count_kv": [2, 2],
        "rope.scaling.yarn_beta_fast": 32.0, "tensor_data_layout": "Meta AI original pth",
        "rope.scaling.type": "none", "rope.scaling.factor": 4.0,
    }  # fmt: skip
    (tmp_path / "plain").mkdir()
    assert config_of(tmp_path, "llama", neutral) == config_of(tmp_path / "plain", "llama")


def test_absent_keys_have_llama_cpps_defaults(tmp_path: Path) -> None:
    lacks = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv", "attention.key_length")
    found = config_of(tmp_path, "llama", {"rope.scaling.factor": 2.0}, (*lacks, "attention.value_length"))
    assert found["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert (found["num_key_value_heads"], found["head_dim"]) == (4, 16)
    with pytest.raises(ModelUnsupported, match=r"it lacks the key llama\.context_length"):
        config_of(tmp_path, "llama", lacks=("context_length",))


def test_the_share_of_a_head_that_is_rotated_is_not_rounded_down(tmp_path: Path) -> None:
    write_gguf_model(random_model(CASES["stablelm"]), tmp_path / "m.gguf", keys={"rope.dimension_count": 58})
    share = rope_parameters(GgufFile(GGUFReader(tmp_path / "m.gguf")), 100, partial=True)[
        "partial_rotary_factor"
    ]
    assert int(100 * 0.58) == 57
    assert int(100 * share) == 58


@pytest.mark.parametrize(("case", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_differently(case: str, layers: int, tmp_path: Path) -> None:
    assert config_of(tmp_path, case)["query_pre_attn_scalar"] == 256
    assert config_of(tmp_path, case, {"block_count": layers})["query_pre_attn_scalar"] == 16


def test_all_tokens_that_end_the_output_are_kept(tmp_path: Path) -> None:
    reader = GGUFReader(written(tmp_path, "llama"))
    assert transformers_config(GgufFile(reader))["eos_token_id"] == 258
    reader.fields["tokenizer.ggml.eot_token_id"] = reader.fields["llama.context_length"]
    assert transformers_config(GgufFile(reader))["eos_token_id"] == [258, 512]


def written(folder: Path, case: str) -> Path:
    write_gguf_model(random_model(CASES[case]), folder / "m.gguf")
    return folder / "m.gguf"


def error_of(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    folder.mkdir()
    capsys.readouterr()
    assert convert.main(["gguf", str(file), str(folder)]) == 1
    return str(json.loads(capsys.readouterr().out.splitlines()[-1])["error"])


def test_an_unused_tensor_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf_model(
        random_model(CASES["llama"]), tmp_path / "m.gguf", tensors={"blk.1.attn_q_norm.weight": 16}
    )
    error = error_of(tmp_path / "m.gguf", tmp_path / "folder", capsys)
    assert error.startswith(
        "its tensor blk.1.attn_q_norm.weight has no place in this model; take the model's"
    )


def test_unknown_architectures_are_refused_with_a_list_of_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_llama(tmp_path / "m.gguf", architecture="granite")
    error = error_of(tmp_path / "m.gguf", tmp_path / "folder", capsys)
    assert error.startswith(
        "its architecture 'granite' is not read here, those that are: gemma2, gemma3, gpt2"
    )


def test_a_part_of_a_file_is_refused(tmp_path: Path) -> None:
    reader = GGUFReader(written(tmp_path, "llama"))
    reader.fields["split.count"] = reader.fields["llama.block_count"]
    with pytest.raises(ModelUnsupported, match="it is one of 2 parts; join them"):
        GgufFile(reader)
