"""Quantised matrices of GGUF files in int8: of every type, with their rows as transformers has them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GgufConfig

from gguf_files import LAYERS, write_tiny_gpt2, write_tiny_llama
from hypothesis_profiles import examples
from shoal.models.gguf.int8_groups import int8_groups, quantise

SCALES_AT = {
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the blocks of a type have their float16 numbers; any other bytes are possible."""
EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")


def random_matrix(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Blocks with any integers, and scales of many magnitudes, 0 and negative ones among them."""
    random = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        numbers = random.standard_normal((rows, blocks)) * 10.0 ** random.integers(-6, 3, (rows, blocks))
        numbers[random.random((rows, blocks)) < 0.1] = 0
        data[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from(sorted(SCALES_AT)), st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32))
def test_groups_of_every_type_match_ggufs_dequantisation(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    data = random_matrix(kind, rows, blocks, seed)
    expected = gguf.dequantize(data, GGMLQuantizationType[kind]).reshape(rows, -1, 32)
    values, scales = quantise(data, GGMLQuantizationType[kind])
    assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    assert values.shape == (rows, expected.size // rows)
    values = values.reshape(expected.shape).astype(np.float64)
    error = np.abs(values * scales[..., None] - expected)
    if kind in EXACT:
        assert (error == 0).all()
    else:
        assert (scales == np.abs(expected).max(axis=2) / np.float32(127)).all()
        assert (error <= scales[..., None] * 0.5001).all()
        assert (np.abs(values).max(axis=2) == np.where(scales > 0, 127, 0)).all()


def test_q8_0_is_kept_bit_for_bit() -> None:
    data = random_matrix("Q8_0", 3000, 2, seed=1)
    blocks = data.reshape(3000, 2, 34)
    blocks[..., :2] = np.float16(0.5).reshape(1).view(np.uint8)  # without a scale there is nothing to keep
    blocks[:, 1, 1] ^= 3
    values, scales = quantise(data, GGMLQuantizationType.Q8_0)
    assert np.array_equal(values.reshape(3000, 2, 32), blocks[..., 2:].view(np.int8))
    stored = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    assert np.array_equal(scales.view(np.int32), stored.astype(np.float32).view(np.int32))


def load(file: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


def halves_first(rows: np.ndarray, head_dim: int = 16) -> np.ndarray:
    """Llama's query and key rows as transformers has them: the first half of a head, then the second."""
    heads = [rows[at : at + head_dim] for at in range(0, len(rows), head_dim)]
    return np.concatenate([half for head in heads for half in (head[0::2], head[1::2])])


def by_hand(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of a Q8_0 matrix."""
    blocks = data.reshape(len(data), -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(data), -1), scales


def test_all_layers_of_a_llama_are_kept_with_their_rows_in_order(tmp_path: Path) -> None:
    stored = write_tiny_llama(
        tmp_path / "m.gguf", hidden=64, inner=96, kv_heads=2, kind=GGMLQuantizationType.Q8_0
    )
    model = load(tmp_path / "m.gguf")
    kept, complete = int8_groups(gguf.GGUFReader(tmp_path / "m.gguf"), model)
    assert complete
    assert len(kept) == 2 * (7 * LAYERS + 1)
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    names = {f"model.layers.{i}.{a}": f"blk.{i}.{b}.weight" for i in range(LAYERS) for a, b in parts.items()}
    for name, in_file in {**names, "lm_head": "token_embd.weight"}.items():
        expected = by_hand(stored[in_file])
        if "attn_q" in in_file or "attn_k" in in_file:
            expected = tuple(map(halves_first, expected))
        assert np.array_equal(kept[f"{name}.values"], expected[0]), name
        assert np.array_equal(kept[f"{name}.scales"], expected[1]), name
        weight = model.get_submodule(name).weight.detach().float().numpy()
        ours = kept[f"{name}.values"] * np.repeat(kept[f"{name}.scales"], 32, axis=1)
        np.testing.assert_allclose(ours, weight, rtol=2**-8)


def test_layers_of_gpt2_whose_weights_are_transposed_are_kept(tmp_path: Path) -> None:
    stored = write_tiny_gpt2(tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    kept, complete = int8_groups(gguf.GGUFReader(tmp_path / "m.gguf"), load(tmp_path / "m.gguf"))
    assert complete
    for name, in_file in {"transformer.h.1.mlp.c_fc": "blk.1.ffn_up", "lm_head": "token_embd"}.items():
        values, scales = by_hand(stored[f"{in_file}.weight"])
        assert np.array_equal(kept[f"{name}.values"], values)
        assert np.array_equal(kept[f"{name}.scales"], scales)


def test_layers_with_another_order_or_other_values_are_omitted(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_tiny_llama(file, hidden=64, inner=96, kind=GGMLQuantizationType.Q4_1, dense="blk.1.ffn_up.weight")
    model = load(file)
    with torch.no_grad():
        first, second = model.model.layers
        first.self_attn.v_proj.weight.copy_(first.self_attn.v_proj.weight.flip(0))
        second.mlp.down_proj.weight[63, 95] *= 1.1
        second.self_attn.o_proj.weight[0, 0] = torch.nan
    kept, complete = int8_groups(gguf.GGUFReader(file), model)
    assert not complete
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    left_out = linears - {name.rpartition(".")[0] for name in kept}
    assert left_out == {
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.o_proj",
    }


def test_a_dense_file_has_no_int8_groups(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "m.gguf", kind=GGMLQuantizationType.F16)
    assert int8_groups(gguf.GGUFReader(tmp_path / "m.gguf"), load(tmp_path / "m.gguf")) == ({}, False)
