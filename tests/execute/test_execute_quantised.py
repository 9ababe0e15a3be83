"""Folders quantised in other ways than GGUF are computed as the dense weights that they stand for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import COMMON, HandScheduler, logits_of, make_model, make_prompt
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from quantised_folders import (
    Packer,
    awq_config,
    compressed_config,
    gptq_config,
    pack_awq,
    pack_compressed,
    pack_fp8,
    pack_gptq,
    pack_int8,
    quantise_folder,
    weights_of,
)
from shoal.core import Service
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models

PROJ = "_proj"
"""In the names of all linear layers but the output head."""
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def int4(strategy: str = "group", **fields: object) -> dict[str, Any]:
    return compressed_config("pack-quantized", weights_of(4, strategy, **fields))


def channel_fp8(form: str = "float-quantized", strategy: str = "channel", **fields: object) -> dict[str, Any]:
    return compressed_config(form, weights_of(8, strategy, type="float", **fields))


CASES: dict[str, tuple[Packer, dict[str, Any]]] = {
    "awq-128": (pack_awq(128), awq_config(128)),
    "awq-64": (pack_awq(64), awq_config(64)),
    "awq-32-old-names": (
        pack_awq(32),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
    ),
    "gptq-4": (pack_gptq(4, 128), gptq_config(4, 128)),
    "gptq-4-without-g-idx": (pack_gptq(4, 32, g_idx=False), gptq_config(4, 32)),
    "gptq-4-asymmetric": (pack_gptq(4, 64, symmetric=False), gptq_config(4, 64, sym=False)),
    "gptq-4-channel": (pack_gptq(4, -1), gptq_config(4, -1)),
    "gptq-4-act-order": (pack_gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True)),
    "gptq-4-v2": (pack_gptq(4, 64, symmetric=False, v2=True), gptq_config(4, 64, v2=True, sym=False)),
    "gptq-8": (pack_gptq(8, 128), gptq_config(8, 128)),
    "gptq-8-asymmetric-v2": (pack_gptq(8, 32, symmetric=False, v2=True), gptq_config(8, 32, v2=True)),
    "packed-4": (pack_compressed(4, 128), int4(group_size=128)),
    "packed-4-channel": (pack_compressed(4, -1), int4("channel")),
    "packed-4-asymmetric": (
        pack_compressed(4, 32, symmetric=False),
        int4(group_size=32, symmetric=False),
    ),
    "packed-4-act-order": (pack_compressed(4, 32, act_order=True), int4(group_size=32, actorder="group")),
    "packed-8": (
        pack_compressed(8, 64),
        compressed_config("pack-quantized", weights_of(8, "group", group_size=64)),
    ),
    "packed-8-asymmetric": (
        pack_compressed(8, -1, symmetric=False),
        compressed_config("pack-quantized", weights_of(8, "channel", symmetric=False)),
    ),
    "int8": (pack_int8(), compressed_config("int-quantized", weights_of(8, "channel"))),
    "int8-asymmetric": (
        pack_int8(symmetric=False),
        compressed_config("int-quantized", weights_of(8, "channel", symmetric=False)),
    ),
    "fp8-channel": (pack_fp8(1, -1, dtype=torch.bfloat16), channel_fp8()),
    "fp8-tensor": (pack_fp8(-1, -1), channel_fp8(strategy="tensor")),
    "fp8-naive-block": (
        pack_fp8(128, 128),
        channel_fp8("naive-quantized", "block", block_structure=[128, 128]),
    ),
    "fp8-blocks": (pack_fp8(128, 128, scale=".weight_scale_inv"), {**FP8, "weight_block_size": [128, 128]}),
    "fp8-one-scale": (pack_fp8(-1, -1), FP8),
}
INTEGERS = [name for name in CASES if "fp8" not in name]


def tiny(kind: str = "llama") -> Any:
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return kinds[kind](**COMMON, **SIZES, **({"head_dim": 32} if kind == "qwen3" else {}))


def made(
    tmp_path: Path, case: str, kind: str = "llama", packers: Mapping[str, Packer] | None = None
) -> tuple[Path, Path]:
    """A quantised folder, and the dense one."""
    packer, config = CASES[case]
    source = make_model(tmp_path / "source", tiny(kind))
    return quantise_folder(source, tmp_path, packers or {PROJ: packer}, config)


def load(folder: Path, dtype: str) -> LoadedModel:
    models = load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder})
    return models.services["s"].model


def rows(folder: Path, dtype: str) -> set[bytes]:
    """Bits of logits."""
    prompts = [make_prompt(n, seed=n) for n in (1, 7, 19)]
    return logits_of(HandScheduler({"m": folder}, dtype=dtype), "m", prompts, 3)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dense_weights(tmp_path: Path, case: str) -> None:
    quantised, dense = made(tmp_path, case, "qwen2" if case.startswith("awq") else "llama")
    assert rows(quantised, "float32") == rows(dense, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["awq-128", "gptq-4-act-order", "packed-4-asymmetric", "fp8-blocks"])
def test_other_dtypes_round_once(tmp_path: Path, case: str, dtype: str) -> None:
    quantised, dense = made(tmp_path, case, "qwen3")
    assert rows(quantised, dtype) == rows(dense, dtype)
