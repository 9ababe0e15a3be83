"""Reference packers of quantised formats, one for each definition, and folders of models that they pack.

Every packer takes a dense matrix, and returns the tensors of its format with the matrix that they stand for.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


class Packed(NamedTuple):
    """A matrix in a format."""

    tensors: Tensors
    """By the end of the name, after that of the module: ``.qweight``."""
    dense: torch.Tensor
    """float32 [outputs, inputs]."""


Packer = Callable[[torch.Tensor], Packed]


class Numbers(NamedTuple):
    """A matrix as (values - zeros) * scales."""

    values: torch.Tensor
    """int64 [outputs, inputs]."""
    zeros: torch.Tensor
    """int64 [outputs, groups]."""
    scales: torch.Tensor
    """float [outputs, groups]."""
    groups: torch.Tensor
    """int64 [inputs], the group of each."""

    @property
    def dense(self) -> torch.Tensor:
        differences = (self.values - self.zeros[:, self.groups]).float()
        return differences * self.scales.float()[:, self.groups]


def quantise(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    least: int = 0,
    order: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Numbers:
    """Round to nearest.

    group: inputs of a group, -1 for all. least: of the range of values. order: inputs in the order in which
    they make up groups. dtype: of scales.
    """
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    groups = torch.empty(inputs, dtype=torch.long)
    groups[torch.arange(inputs) if order is None else order] = torch.arange(inputs) // size
    top, count = 2**bits - 1, -(-inputs // size)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(count)], 1).clamp_min(0)
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(count)], 1).clamp_max(0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).clamp_min(1e-5).to(dtype)
    middle = torch.full_like(scales, least + 2 ** (bits - 1), dtype=torch.float32)
    zeros = middle if symmetric else (least - low / scales.float()).round().clamp(least, least + top)
    values = weight / scales.float()[:, groups] + zeros[:, groups]
    return Numbers(values.round().clamp(least, least + top).long(), zeros.long(), scales, groups)


def to_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n * bits / 32] of unsigned numbers [..., n], padded by 0, the first in the lowest bits."""
    count = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % count))
    shifts = torch.arange(count) * bits
    return signed((padded.unflatten(-1, (-1, count)) << shifts).sum(-1))


def signed(words: torch.Tensor) -> torch.Tensor:
    """int32 with the lowest 32 bits of int64."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def pack_awq(group: int) -> Packer:
    """AutoAWQ's gemm: eight columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def words(numbers: torch.Tensor) -> torch.Tensor:
        columns = numbers.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)
        return to_words(columns, 4)

    def pack(weight: torch.Tensor) -> Packed:
        found = quantise(weight, 4, group, symmetric=False)
        return Packed(
            {
                ".qweight": words(found.values.T),
                ".qzeros": words(found.zeros.T),
                ".scales": found.scales.T.contiguous(),
            },
            found.dense,
        )

    return pack


def pack_gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    v2: bool = False,
    g_idx: bool = True,
) -> Packer:
    """GPTQ: values packed along inputs, zeros along outputs; in the first format less by one in each word."""

    def pack(weight: torch.Tensor) -> Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        found = quantise(weight, bits, group, symmetric=symmetric, order=order if act_order else None)
        zeros = to_words(found.zeros.T, bits).long()
        ones = sum(1 << shift for shift in range(0, 32, bits))
        tensors = {
            ".qweight": to_words(found.values, bits).T.contiguous(),
            ".qzeros": signed(zeros if v2 else zeros - ones),
            ".scales": found.scales.T.contiguous(),
        }
        if g_idx:
            tensors[".g_idx"] = found.groups.to(torch.int32)
        return Packed(tensors, found.dense)

    return pack


def pack_compressed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Packer:
    """compressed-tensors' pack-quantized: values and zeros are signed, and stored with an offset."""

    def pack(weight: torch.Tensor) -> Packed:
        least = -(2 ** (bits - 1))
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2))
        found = quantise(
            weight, bits, group, symmetric=symmetric, least=least,
            order=order if act_order else None, dtype=torch.bfloat16,
        )  # fmt: skip
        tensors = {
            ".weight_packed": to_words(found.values - least, bits),
            ".weight_scale": found.scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = to_words((found.zeros - least).T, bits).T.contiguous()
        if act_order:
            tensors[".weight_g_idx"] = found.groups.to(torch.int32)
        return Packed(tensors, found.dense)

    return pack


def pack_int8(*, symmetric: bool = True) -> Packer:
    """compressed-tensors' int-quantized: an int8 for each number, a scale for each output."""

    def pack(weight: torch.Tensor) -> Packed:
        found = quantise(weight, 8, -1, symmetric=symmetric, least=-128, dtype=torch.bfloat16)
        tensors = {".weight": found.values.to(torch.int8), ".weight_scale": found.scales}
        if not symmetric:
            tensors[".weight_zero_point"] = found.zeros.to(torch.int8)
        return Packed(tensors, found.dense)

    return pack


def pack_fp8(
    rows: int, columns: int, *, scale: str = ".weight_scale", dtype: torch.dtype = torch.float32
) -> Packer:
    """float8 (e4m3) with a scale for each block of ``rows`` outputs and ``columns`` inputs, -1 for all."""

    def pack(weight: torch.Tensor) -> Packed:
        outputs, inputs = weight.shape
        height, width = outputs if rows == -1 else rows, inputs if columns == -1 else columns
        scales = torch.empty(-(-outputs // height), -(-inputs // width))
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                block = weight[row * height :, column * width :][:height, :width]
                scales[row, column] = block.abs().max() / 448
        scales = scales.to(dtype)
        spread = scales.float().repeat_interleave(height, 0)[:outputs].repeat_interleave(width, 1)[:, :inputs]
        values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales[0] if rows == columns == -1 else scales
        return Packed({".weight": values, scale: stored}, values.float() * spread)

    return pack


def awq_config(group: int, **fields: object) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None, **fields,
    }  # fmt: skip


def gptq_config(bits: int, group: int, *, v2: bool = False, **fields: object) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", **fields,
    }  # fmt: skip


def weights_of(bits: int, strategy: str, **fields: object) -> dict[str, Any]:
    """The ``weights`` of a config group."""
    return {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": None,
        "block_structure": None, "dynamic": False, "actorder": None, **fields,
    }  # fmt: skip


def compressed_config(
    form: str, weights: Mapping[str, Any], *, targets: list[str] | None = None, **fields: object
) -> dict[str, Any]:
    """A quantization_config with one group."""
    activations = {"num_bits": 8, "type": weights["type"], "dynamic": True, "strategy": "token"}
    group = {
        "targets": targets or ["Linear"],
        "weights": weights,
        "input_activations": None if form == "pack-quantized" else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **fields,
    }  # fmt: skip


def quantise_folder(
    folder: Path, target: Path, packers: Mapping[str, Packer], config: Mapping[str, Any] | None
) -> tuple[Path, Path]:
    """Folders of the model in ``folder`` with quantised weights, and with the dense ones that they stand for.

    packers: by a part of the names of modules, the first that is found; other tensors stay as they are.
    config: quantization_config.
    """
    quantised: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        packer = next((packers[part] for part in packers if part in module), None)
        if packer is None or module == name or tensor.ndim != 2:
            quantised[name] = dense[name] = tensor
            continue
        packed = packer(tensor.float())
        quantised |= {module + end: part for end, part in packed.tensors.items()}
        dense[name] = packed.dense
    plain = json.loads((folder / "config.json").read_text())
    folders = target / "quantised", target / "dense"
    for made, tensors in zip(folders, (quantised, dense), strict=True):
        made.mkdir(parents=True)
        for file in folder.iterdir():
            (made / file.name).write_bytes(file.read_bytes())
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (folders[0] / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    return folders
