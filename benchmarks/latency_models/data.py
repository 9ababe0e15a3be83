"""Measured kernels for `benchmarks.latency_models`: operations, bytes and seconds.

Reads the operator tables of aiconfigurator (parquet; needs pyarrow), a layer profile, and the prompt and
token times of splitwise-sim.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.profile_files.reading import read_profile
from shoal.forecast.roofline import expected_active_experts

MEASURED = {"a100-80": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}
Rows = list["Kernel"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One measured kernel: operations, bytes moved, sequences in its batch, seconds."""

    flops: float
    moved: float
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """One measured all-reduce: bytes, devices, seconds."""

    message: int
    devices: int
    seconds: float


def kernels(folder: Path, device: DeviceSpec) -> dict[str, Rows]:
    """Kernels measured on ``device``, by kind as in ``Efficiencies``.

    Points faster than the memory bandwidth allows ran from cache, unlike in a model; they are left out.
    """
    tables = folder / MEASURED[device.name]
    kinds = {
        "matmul": _matmul(_table(tables, "gemm", "gemm_perf")),
        "prefill": _prefill(_table(tables, "attention", "context_attention_perf")),
        "decode": _decode(_table(tables, "attention", "generation_attention_perf")),
        "experts": _experts(_table(tables, "moe", "moe_perf")),
    }
    return {
        kind: [row for row in rows if row.seconds > row.moved / device.bandwidth]
        for kind, rows in kinds.items()
    }


def reductions(folder: Path, device: DeviceSpec) -> list[Reduction]:
    """All-reduces of 16-bit numbers up to 64 MiB, by the faster of vLLM's own kernel and NCCL."""
    best: dict[tuple[int, int], float] = {}
    own = _table(folder / MEASURED[device.name], "comm", "custom_allreduce_perf")
    rows = [row for row in own if row["backend"] == "vllm_graph"]
    nccl = [
        {**row, "message_size": 2 * row["message_size"]}
        for row in _table(folder / MEASURED[device.name], "comm", "nccl_perf")
        if row["op_name"] == "all_reduce" and row["nccl_dtype"] == "half"
    ]
    for row in rows + nccl:
        key = int(row["message_size"]), int(row["num_gpus"])
        best[key] = min(best.get(key, np.inf), row["latency"] * 1e-3)
    return [Reduction(*key, seconds) for key, seconds in sorted(best.items()) if key[0] <= 64 << 20]


def profile_kernels(folder: Path) -> dict[str, Rows]:
    """Kernels of Llama-3.1-8B's layer profile."""
    files = read_profile(folder, 1)
    shapes = {"qkv_proj": (4096, 6144), "o_proj": (4096, 4096), "gate_up_proj": (4096, 28_672)}
    shapes["down_proj"] = (14_336, 4096)
    curves = [(shape, files.dense[name]) for name, shape in shapes.items()]
    curves.append(((4096, 128_256), files.per_sequence["lm_head"]))
    matmul = [
        _product(m, n, k, micros / 1e6)
        for (k, n), curve in curves
        for m, micros in zip(curve.counts, curve.micros, strict=True)
    ]
    activation = files.dense["act_fn"]
    pointwise = [
        Kernel(0.0, 3 * 14_336 * 2 * m, 0, micros / 1e6)
        for m, micros in zip(activation.counts, activation.micros, strict=True)
    ]
    prefill, decode = [], []
    for (chunk, key, decodes, length), micros in files.attention.items():
        context = key - chunk / 2  # below 0 in points of several chunks, which were not measured
        if chunk == 0:
            decode.append(Kernel(0.0, decodes * length * 8 * 128 * 4, decodes, micros / 1e6))
        elif decodes == 0 and context >= 0:
            pairs = chunk * context + chunk * (chunk + 1) / 2
            moved = 2 * chunk * 4096 * 2 + (chunk + context) * 8 * 128 * 4
            prefill.append(Kernel(4 * pairs * 4096, moved, 1, micros / 1e6))
    return {"matmul": matmul, "prefill": prefill, "decode": decode, "pointwise": pointwise}


def splitwise(path: Path) -> Iterator[dict[str, Any]]:
    """Median prompt and token times in seconds of each configuration of Llama2-70B."""
    groups: dict[tuple[str, int, int, int, int], list[tuple[float, float]]] = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["model"] == "llama2-70b":
                numbers = (
                    int(row[name]) for name in ("tensor_parallel", "batch_size", "prompt_size", "token_size")
                )
                key = (row["hardware"], *numbers)
                groups.setdefault(key, []).append((float(row["prompt_time"]), float(row["token_time"])))  # type: ignore[arg-type]
    for (hardware, tp, batch, prompt, output), times in groups.items():
        first, token = np.median(np.array(times), axis=0) / 1e3
        yield {
            "hardware": hardware, "tp": tp, "batch": batch, "prompt": prompt, "output": output,
            "prompt_s": float(first), "token_s": float(token),
        }  # fmt: skip


def _table(folder: Path, kind: str, name: str) -> list[dict[str, Any]]:
    """Rows of the newest version's table; empty without a table."""
    import pyarrow.parquet as parquet

    paths = sorted(folder.glob(f"{kind}/*/*/{name}.parquet"))
    return parquet.read_table(paths[-1]).to_pylist() if paths else []


def _product(m: float, n: float, k: float, seconds: float) -> Kernel:
    return Kernel(2 * m * n * k, 2 * (m * k + k * n + m * n), 0, seconds)


def _matmul(table: list[dict[str, Any]]) -> Rows:
    return [
        _product(row["m"], row["n"], row["k"], row["latency"] * 1e-3)
        for row in table
        if row["gemm_dtype"] == "bfloat16" and min(row["n"], row["k"]) >= 512 and row["m"] <= 8192
    ]


def _usual(row: dict[str, Any]) -> bool:
    """Attention of 16-bit numbers over the whole context, with a common shape of heads."""
    whole = not row.get("window_size") and row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
    return whole and row["head_dim"] == 128 and 4 <= row["num_heads"] <= 64


def _prefill(table: list[dict[str, Any]]) -> Rows:
    rows = []
    for row in filter(_usual, table):
        batch, length, heads = row["batch_size"], row["isl"], row["num_heads"]
        if length < 16 or batch * length > 65_536:
            continue
        pairs = batch * length * (length + 1) / 2
        moved = batch * length * 128 * 2 * 2 * (heads + row["num_key_value_heads"])
        rows.append(Kernel(4 * pairs * heads * 128, moved, batch, row["latency"] * 1e-3))
    return rows


def _decode(table: list[dict[str, Any]]) -> Rows:
    rows = []
    for row in filter(_usual, table):
        batch, length = row["batch_size"], row["step"] + 1
        if 16 <= length <= 32_768 and batch <= 512:
            moved = batch * length * row["num_key_value_heads"] * 128 * 4
            rows.append(Kernel(0.0, moved, batch, row["latency"] * 1e-3))
    return rows


def _experts(table: list[dict[str, Any]]) -> Rows:
    rows = []
    for row in table:
        plain = row["moe_dtype"] == "bfloat16" and row["moe_ep_size"] == 1
        if not plain or row["distribution"] != "power_law_1.01" or row["num_tokens"] > 8192:
            continue
        chosen = row["num_tokens"] * row["topk"]
        numbers = 3 * row["hidden_size"] * row["inter_size"] / row["moe_tp_size"]
        touched = expected_active_experts(row["num_experts"], row["topk"], row["num_tokens"])
        moved = 2 * (touched * numbers + 2 * chosen * row["hidden_size"])
        rows.append(Kernel(2 * chosen * numbers, moved, 0, row["latency"] * 1e-3))
    return rows
