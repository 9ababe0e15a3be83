"""What quantization_config says, what is refused of it, and facts of quantised folders."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from models_builders import byte_level_backend, make_folder
from safetensors.torch import save_file

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
    weights_of,
)
from shoal.core import ModelUnsupported
from shoal.models import check_weights, describe_model, read_weight_headers, resolve_model
from shoal.models.quantised.config import quantisation_of
from shoal.models.quantised.scheme import WHOLE, Scheme, Storage

SIZES = {
    "model_type": "llama", "vocab_size": 24, "num_attention_heads": 2, "hidden_size": 64,
    "max_position_embeddings": 16, "num_hidden_layers": 1,
}  # fmt: skip
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
GROUP_32 = compressed_config("pack-quantized", weights_of(4, "group", group_size=32))
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def make(
    folder: Path, packers: Mapping[str, Packer], config: object, *, without: str = "", **changed: torch.Tensor
) -> Path:
    """A folder with a norm, a head, and matrices [96, 64] by ``packers``.

    without: end of a tensor's name that is left out. changed: other tensors, by their name.
    """
    weights = {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.zeros(24, 64)}
    for number, (module, packer) in enumerate(packers.items()):
        matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(number))
        weights |= {module + end: part for end, part in packer(matrix).tensors.items()}
    weights = {name: part for name, part in weights.items() if not (without and name.endswith(without))}
    make_folder(folder, byte_level_backend(), config={**SIZES, "quantization_config": config})
    save_file(weights | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


AWQ, GPTQ = awq_config(32), gptq_config(4, 32)
PACKED = GROUP_32["config_groups"]["group_0"]


def group(**fields: object) -> dict[str, Any]:
    return {**GROUP_32, "config_groups": {"g": {**PACKED, **fields}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("hqq", r"quantised \(hqq\).*awq, gptq, compressed-tensors, fp8"),
        ({"quant_method": ["awq"]}, r"quantised \(\['awq'\]\)"),
        ({**AWQ, "version": "gemv"}, "AWQ's version gemv.*possible: version gemm"),
        ({**AWQ, "backend": "llm-awq"}, "AWQ's version llm-awq"),
        ({**AWQ, "bits": 8}, "AWQ with 8 bits.*possible: 4"),
        ({**AWQ, "bits": "4"}, "bits: '4'.*an integer"),
        ({**AWQ, "zero_point": False}, "AWQ without zero points"),
        ({**AWQ, "group_size": 0}, "group_size: 0"),
        ({**GPTQ, "bits": 3}, "GPTQ with 3 bits.*possible: 4 and 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin.*gptq and gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype int16"),
        ({**GPTQ, "dynamic": {"+:.*up": {"bits": 2}}}, "GPTQ with 2 bits"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, r"pattern '\('"),
        ({**GPTQ, "dynamic": ["x"]}, "dynamic: "),
        ({**GROUP_32, "format": "marlin-24"}, "format marlin-24.*pack-quantized"),
        ({**GROUP_32, "format": "nvfp4-pack-quantized"}, "format nvfp4"),
        (group(format="mxfp4-pack-quantized"), "format mxfp4"),
        ({**GROUP_32, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({**GROUP_32, "transform_config": {"config_groups": {"u": {}}}}, "rotations"),
        ({**GROUP_32, "config_groups": {"W4A16": ["Linear"]}}, "names of schemes only"),
        ({**GROUP_32, "config_groups": {}}, "no weights that are quantised"),
        ({**GROUP_32, "ignore": "lm_head"}, "ignore: 'lm_head'.*a list"),
        (group(input_activations={"num_bits": 4}), "activations with 4 bits"),
        (group(weights=weights_of(2, "channel")), "weights of int with 2 bits"),
        (group(weights=weights_of(4, "channel", type="float")), "weights of float with 4 bits"),
        (group(weights=weights_of(4, "tensor_group")), "strategy tensor_group"),
        (group(weights=weights_of(8, "block", block_structure=[1])), r"blocks of \[1\]"),
        (group(targets=["re:["]), r"pattern '\['"),
        ({**FP8_BLOCKS, "expert_dtype": "fp4"}, "experts in fp4"),
        ({**FP8_BLOCKS, "fmt": "e5m2"}, "format e5m2"),
        ({**FP8_BLOCKS, "weight_block_size": "x"}, "blocks of x"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        resolve_model(str(make(tmp_path, {}, config)))


def test_a_config_may_have_the_older_names() -> None:
    old = {key: value for key, value in GROUP_32.items() if key != "quant_method"}
    nested = {"text_config": {"compression_config": old}}
    found = quantisation_of(nested, Path("m"))
    assert found is not None
    assert found.scheme_of(UP) == Scheme(Storage.PACKED, 4, (1, 32))
    assert quantisation_of({"quantization_config": None}, Path("m")) is None


@pytest.mark.parametrize("config", [GROUP_32, FP8_BLOCKS])
def test_a_scheme_of_kv_changes_nothing_of_weights(config: dict[str, Any]) -> None:
    def found(**fields: object) -> object:
        return quantisation_of({"quantization_config": {**config, **fields}}, Path("m"))

    assert found() == found(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})


def test_exact_names_come_before_patterns_and_patterns_before_classes() -> None:
    def targets(bits: int, *names: str) -> dict[str, Any]:
        return {"targets": list(names), "weights": weights_of(bits, "channel"), "format": "pack-quantized"}

    groups = {
        "a": targets(4, "Linear"),
        "b": targets(8, "re:.*mlp", DOWN),
        "c": {**targets(8, UP, "re:.*up$"), "weights": weights_of(4, "group", group_size=64)},
        "d": {"targets": ["re:.*o_proj"], "weights": None},
    }
    config = {**GROUP_32, "format": "mixed-precision", "config_groups": groups, "ignore": ["re:.*gate$", "h"]}
    found = quantisation_of({"quantization_config": config}, Path("m"))
    assert found is not None
    channel4, channel8 = (Scheme(Storage.PACKED, bits, (1, WHOLE)) for bits in (4, 8))
    assert found.scheme_of("model.layers.0.self_attn.q_proj") == channel4
    assert found.scheme_of("hh") == channel4
    assert found.scheme_of(DOWN) == channel8
    assert found.scheme_of(UP) == Scheme(Storage.PACKED, 4, (1, 64))
    assert [found.scheme_of(name) for name in ("x.mlp.gate", "h", "x.o_proj")] == [None] * 3


def test_gptq_may_have_other_settings_for_some_modules() -> None:
    dynamic = {"-:.*down": {}, "+:.*up": {"bits": 8, "group_size": -1}, ".*gate": {"sym": False}}
    found = quantisation_of({"quantization_config": {**GPTQ, "dynamic": dynamic}}, Path("m"))
    assert found is not None
    plain = Scheme(Storage.GPTQ, 4, (1, 32), zeros_less_one=True)
    assert found.scheme_of("m.q_proj") == plain
    assert found.scheme_of("m.down_proj") is None
    assert found.scheme_of("m.up_proj") == Scheme(Storage.GPTQ, 8, (1, WHOLE), zeros_less_one=True)
    assert found.scheme_of("m.gate_proj") == Scheme(
        Storage.GPTQ, 4, (1, 32), symmetric=False, zeros_less_one=True
    )


KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "AWQ-INT4": (pack_awq(32), AWQ),
    "GPTQ-INT8": (pack_gptq(8, 32), gptq_config(8, 32)),
    "INT4": (pack_compressed(4, 32), GROUP_32),
    "INT8": (pack_int8(), compressed_config("int-quantized", weights_of(8, "channel"))),
    "FP8": (pack_fp8(128, 128, scale=".weight_scale_inv"), FP8_BLOCKS),
}


@pytest.mark.parametrize("label", KINDS)
def test_facts_are_those_of_the_matrices(tmp_path: Path, label: str) -> None:
    packer, config = KINDS[label]
    folder = make(tmp_path, {UP: packer, DOWN: packer}, config)
    assert resolve_model(str(folder)) == folder
    headers = read_weight_headers(folder)
    assert headers.keys() == {"model.norm.weight", "lm_head.weight", f"{UP}.weight", f"{DOWN}.weight"}
    assert headers[f"{UP}.weight"].shape == (96, 64)
    described = describe_model("m", folder, "bfloat16")
    assert described.parameters == 64 + 24 * 64 + 2 * 96 * 64
    assert described.quantisation == label
    assert described.size_bytes == (folder / "model.safetensors").stat().st_size
    assert described.format == "safetensors"


@pytest.mark.parametrize(
    ("packer", "config", "without", "changed", "message"),
    [
        (pack_awq(32), AWQ, ".qzeros", {}, rf"no tensor {UP}\.qzeros"),
        (pack_gptq(4, 32), {**GPTQ, "desc_act": True}, ".g_idx", {}, rf"no tensor {UP}\.g_idx"),
        (pack_gptq(4, 32), gptq_config(4, 64), "", {}, r"scales as F16 \[2, 96\].* F16 .*\[1, 96\]"),
        (pack_gptq(4, 32), gptq_config(8, 32), "", {}, r"\.qzeros as I32 \[2, 12\].*I32 \[1, 24\]|scales"),
        (pack_gptq(4, 32), GPTQ, "", {".g_idx": torch.zeros(3).int()}, r"g_idx as I32 \[3\]"),
        (pack_gptq(4, 32), GPTQ, "", {".qweight": torch.zeros(8, 96).long()}, r"qweight as I64 .* is I32$"),
        (pack_awq(32), AWQ, "", {".qweight": torch.zeros(2, 64, 12).int()}, "with 3 dimensions"),
        (pack_compressed(4, 32), AWQ, "", {}, rf"stores {UP}\.weight_packed .* says nothing of that"),
        (pack_compressed(4, 32), {**GROUP_32, "ignore": [UP]}, "", {}, "says nothing of that"),
        (pack_compressed(4, 32), None, "", {}, "has no quantization_config; possible are"),
        (pack_fp8(128, 128), {**FP8_BLOCKS, "weight_block_size": [64, 64]}, "", {}, r"is .*\[2, 1\]"),
        (
            pack_fp8(128, 128, scale=".weight_scale_inv"),
            FP8_BLOCKS,
            "",
            {".experts": torch.zeros(2, 8, 8).to(torch.float8_e4m3fn)},
            r"up_proj\.experts as F8_E4M3.* says nothing of that",
        ),
        (pack_int8(), FP8_BLOCKS, "", {}, r"as I8 \[96, 64\], .* is F8_E4M3"),
    ],
)
def test_tensors_that_the_config_does_not_describe_are_named(
    tmp_path: Path,
    packer: Packer,
    config: object,
    without: str,
    changed: dict[str, torch.Tensor],
    message: str,
) -> None:
    others = {UP + end: tensor for end, tensor in changed.items()}
    folder = make(tmp_path, {UP: packer}, config, without=without, **others)
    with pytest.raises(ModelUnsupported, match=message):
        check_weights(folder)


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_a_pattern_that_would_take_for_ever_is_refused(form: str) -> None:
    endless, name = "(a|a)*$", "a" * 60 + "!"
    config = {**GPTQ, "dynamic": {f"-:{endless}": {}}}
    if form != "gptq":
        config = {**GROUP_32, "ignore": [f"re:{endless}"]}
    found = quantisation_of({"quantization_config": config}, Path("m"))
    assert found is not None
    assert found.scheme_of("aaaa!") is not None
    with pytest.raises(ModelUnsupported, match=r"\(a\|a\).*takes too long"):
        found.scheme_of(name)


def test_a_null_in_the_text_config_hides_no_quantisation() -> None:
    config = {"quantization_config": AWQ, "text_config": {"quantization_config": None}}
    assert quantisation_of(config, Path("m")) is not None


@pytest.mark.parametrize(
    "config",
    [
        [1],
        5,
        {"quant_method": None},
        {**AWQ, "group_size": 10**30},
        {**GPTQ, "dynamic": {"+:x": 5}},
        {**GPTQ, "dynamic": {"(?P<a>x)(?P<a>y)": {}}},
        {**GPTQ, "bits": True},
        {**GROUP_32, "format": ["x"], "config_groups": 5},
        {**GROUP_32, "ignore": [None, {}, "re:("]},
        {**FP8_BLOCKS, "weight_block_size": [10**40, 1]},
        {**FP8_BLOCKS, "weight_block_size": [0, 1]},
        {**FP8_BLOCKS, "fmt": None},
        group(targets="Linear"),
        group(targets=[["x"]]),
        group(targets=["re:" + "(" * 5000 + ")" * 5000]),
        group(targets=["re:a{99999999999999}"]),
        group(targets=["re:" + "(" * 400 + ")" * 400]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_odd_configs_are_read_or_refused_by_an_error_of_ours(tmp_path: Path, config: object) -> None:
    with suppress(ModelUnsupported):
        resolve_model(str(make(tmp_path, {}, config)))
