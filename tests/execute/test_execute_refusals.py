"""Models that would give wrong text are refused when they are loaded, with the reason."""

from pathlib import Path

import pytest
from execute_builders import COMMON, make_model, tiny_config
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GptOssConfig,
    Llama4TextConfig,
    NemotronConfig,
    PhimoeConfig,
    Qwen3NextConfig,
    T5Config,
)

from shoal.core import ConfigError, ModelUnsupported, Service
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.execute.model.probe import probe


def load(folder: Path, **service: object) -> ModelSet:
    return load_models([Service(name="s", model=folder.name, **service)], {"s": folder})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        load(folder)
    return str(caught.value)


def test_qwen3_next_is_refused_for_its_linear_attention(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        **COMMON, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=2,
        num_experts_per_tok=1, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    message = refusal(make_model(tmp_path / "next", config))
    assert "linear_attention" in message
    assert "Qwen3Next" in message


def test_llama4_is_refused_for_its_chunked_attention(tmp_path: Path) -> None:
    config = Llama4TextConfig(
        **COMMON, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2,
    )  # fmt: skip
    assert "chunked_attention" in refusal(make_model(tmp_path / "llama4", config))


def test_bloom_is_refused_for_having_no_attention_interface(tmp_path: Path) -> None:
    config = BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=2)
    message = refusal(make_model(tmp_path / "bloom", config))
    assert "Bloom" in message
    assert "attention interface" in message


def test_attention_sinks_are_refused_by_name(tmp_path: Path) -> None:
    config = GptOssConfig(
        **COMMON, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert "s_aux" in refusal(make_model(tmp_path / "oss", config))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    T5Config(vocab_size=99, d_model=32, d_ff=32, num_layers=2, num_heads=2).save_pretrained(tmp_path / "t5")
    message = refusal(tmp_path / "t5")
    assert "T5" in message


def test_a_window_that_only_the_mask_has_is_refused(tmp_path: Path) -> None:
    config = PhimoeConfig(
        **COMMON, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, sliding_window=8,
    )  # fmt: skip
    assert "sliding_window=8" in refusal(make_model(tmp_path / "phimoe", config))


def test_a_model_that_drops_the_step_keyword_is_refused(tmp_path: Path) -> None:
    config = NemotronConfig(
        **COMMON, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    assert "Nemotron" in refusal(make_model(tmp_path / "nemotron", config))


def test_a_window_shorter_than_the_probes_prompts_is_supported(tmp_path: Path) -> None:
    config = tiny_config("mistral")
    config.sliding_window = 3
    assert load(make_model(tmp_path / "narrow", config)).services["s"].context_tokens == 256


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text('{"model_type": "brand_new", "vocab_size": 9}')
    assert "brand_new" in refusal(tmp_path / "new")


def test_a_model_with_more_than_our_attention_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        make_model(tmp_path / "m", tiny_config("llama")), attn_implementation="shoal"
    )
    layer = model.model.layers[1].self_attn
    calls = layer.forward

    def leaks(*args: object, **kwargs: object) -> object:
        output, weights = calls(*args, **kwargs)
        return output + output.mean(dim=1, keepdim=True), weights

    layer.forward = leaks
    with pytest.raises(ModelUnsupported, match="differ from its own"):
        probe(model, "leaky")


def test_dynamic_rope_scaling_limits_the_context(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert load(make_model(tmp_path / "dynamic", config)).services["s"].context_tokens == 64


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}, 800),
        ({"rope_type": "linear", "factor": 2.0}, 512),
    ],
    ids=["yarn", "linear"],
)
def test_scaled_positions_extend_the_context(
    scaling: dict[str, object], context: int, tmp_path: Path
) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_theta": 10000.0, **scaling}
    folder = make_model(tmp_path / "scaled", config)
    assert load(folder).services["s"].context_tokens == context
    assert load(folder, max_model_len=context).services["s"].context_tokens == context
    with pytest.raises(ConfigError, match=f"beyond the model's context of {context} tokens"):
        load(folder, max_model_len=context + 1)


def test_max_model_len_limits_the_context_and_is_checked(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tiny_config("llama"))
    assert load(folder, max_model_len=100).services["s"].context_tokens == 100
    with pytest.raises(ConfigError, match="256"):
        load(folder, max_model_len=1000)


def test_unknown_dtypes_devices_and_missing_cuda_are_config_errors(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tiny_config("llama"))
    with pytest.raises(ConfigError, match="float32"):
        load(folder, dtype="int3")
    with pytest.raises(ConfigError, match="reference"):
        load_models([Service(name="s", model="m")], {"s": folder}, attention="flash")
    for device in ("mps", "foo", "cuda:", "cpu:x", "cuda:99999999999"):
        with pytest.raises(ConfigError, match="possible are cpu and cuda:N"):
            load_models([Service(name="s", model="m")], {"s": folder}, device=device)
    with pytest.raises(ConfigError, match=r"'cuda:77': this torch sees no such CUDA device; possible: cpu"):
        load_models([Service(name="s", model="m")], {"s": folder}, device="cuda:77")
