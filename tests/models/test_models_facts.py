from pathlib import Path

import pytest
from models_builders import make_folder

from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models import LayerFacts, read_facts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({}, LayerFacts(8, 8, 8)),
        ({"num_key_value_heads": 2}, LayerFacts(2, 8, 8)),
        ({"num_key_value_heads": None, "head_dim": None}, LayerFacts(8, 8, 8)),
        ({"num_key_value_heads": 1, "head_dim": 256}, LayerFacts(1, 256, 256)),
        ({"multi_query": True}, LayerFacts(1, 8, 8)),
        (
            {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4},
            LayerFacts(4, 8, 8),
        ),
        (
            {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10},
            LayerFacts(8, 16, 10),
        ),
    ],
)
def test_kv_shape(tmp_path: Path, changes: dict[str, object], layer: LayerFacts) -> None:
    facts = read_facts(make_folder(tmp_path, None, config={**LLAMA, **changes}))
    assert facts.layers == (layer, layer)
    assert (facts.architecture, facts.context_tokens, facts.vocab_size) == ("LlamaForCausalLM", 512, 100)
    assert facts.eos_token_ids == (2,)


def test_gpt2_names(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 32,
        "n_positions": 64,
        "vocab_size": 9,
    }
    facts = read_facts(make_folder(tmp_path, None, config=config))
    assert facts.layers == (LayerFacts(4, 8, 8),) * 3
    assert (facts.architecture, facts.context_tokens, facts.eos_token_ids) == ("gpt2", 64, ())


def test_opt_projects_its_embedding_but_not_its_heads(tmp_path: Path) -> None:
    facts = read_facts(
        make_folder(tmp_path, None, config={**LLAMA, "word_embed_proj_dim": 16, "ffn_dim": 99})
    )
    assert facts.layers[0] == LayerFacts(8, 8, 8)


def test_nested_text_config_wins(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": LLAMA,
        "hidden_size": 1,
        "eos_token_id": [1, 106],
    }
    facts = read_facts(
        make_folder(tmp_path, None, config=config, generation_config={"eos_token_id": [1, 106]})
    )
    assert facts.layers[0] == LayerFacts(8, 8, 8)
    assert facts.architecture == "Gemma3ForConditionalGeneration"
    assert facts.eos_token_ids == (1, 106)


def rope_of(kind: str, original: int | None = None, **further: object) -> dict[str, object]:
    known = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, **known, **further}


def rope(kind: str, original: int | None = None, **further: object) -> dict[str, object]:
    return {"rope_parameters": rope_of(kind, original, **further)}


def by_layer(full: dict[str, object], sliding: dict[str, object]) -> dict[str, object]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
        (rope("longrope", original=128), 128),
        ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 128}, 128),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 128}, 128),
        (rope("longrope", original=128, short_factor=[1, 2], long_factor=[1, 3]), 128),
        (rope("longrope", original=128, short_factor=[1, 2], long_factor=[1, 2]), 512),
        (rope("llama3", original=256, factor=8.0), 512),
        (rope("yarn", factor=4.0), 2048),
        (rope("yarn", factor=4.0, original=384), 1536),
        (rope("yarn", factor=2, original=128), 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({**rope("default"), "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        (rope("yarn", factor=float("inf")), 512),
        (rope("yarn", factor=None, original=128), 512),
        (rope("linear", factor=2.5), 1280),
        (by_layer(rope_of("yarn", factor=4.0), rope_of("default")), 2048),
        (by_layer(rope_of("default"), rope_of("yarn", factor=4.0)), 512),
        (by_layer(rope_of("default"), rope_of("longrope", original=128)), 128),
        ({"model_type": "gemma3_text", **rope("linear", factor=8.0)}, 512),
        ({"rope_scaling": None}, 512),
    ],
)
def test_context_under_rope_scaling(tmp_path: Path, changes: dict[str, object], context: int) -> None:
    facts = read_facts(make_folder(tmp_path, None, config={**LLAMA, **changes}))
    assert facts.context_tokens == context


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    with pytest.raises(ModelUnsupported, match="does not say num_attention_heads or n_head"):
        read_facts(make_folder(tmp_path, None, config=config))


def test_no_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelUnavailable, match="no JSON object"):
        read_facts(tmp_path)
