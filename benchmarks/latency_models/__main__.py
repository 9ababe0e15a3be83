"""Errors of the roofline step times against measured kernels and steps, and fits of its efficiencies.

    python -m benchmarks.latency_models --calibration FOLDER [--fit] [--json PATH]

FOLDER holds ``op_latency`` (operator tables of aiconfigurator; needs pyarrow), ``vllm_rtx4090_llama31_8b``
(layer profile of LLMServingSim) and ``splitwise_perf_model``; missing ones are skipped. Prints, for each
device and kind of kernel, the median and the 90th percentile of the roofline's relative error; whole steps
of Llama-3.1-8B on an RTX 4090 against the layer profile; and prompt and token times of Llama-2-70B against
those of splitwise-sim. With ``--fit`` it fits the efficiencies, prints them as written in
``device_specs.py``, and the errors after the fit.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

from benchmarks.latency_models import data
from shoal.forecast.device_specs import DEVICE_SPECS, DeviceSpec
from shoal.forecast.model_spec import MODEL_SPECS
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes
from shoal.forecast.roofline_ops import Efficiency, Link
from shoal.forecast.step_times import StepRows

MOST_SAMPLES = 1500
"""Kernels in a fit, evenly spaced; errors are of all."""
SPLITWISE_DEVICES = {"a100-80gb": "a100-80", "h100-80gb": "h100"}
FREE = {
    "matmul": ("compute", "memory", "start_s", "overlap"),
    "experts": ("compute", "memory", "start_s", "overlap"),
    "prefill": ("compute", "memory", "start_s", "row_s"),
    "decode": ("memory", "start_s", "row_s"),
    "pointwise": ("memory", "start_s"),
}
"""Fitted parameters by kind."""
FIRST = {"compute": 0.6, "memory": 0.8, "start_s": 5e-6, "overlap": 2.0, "row_s": 1e-7}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder: Path = options.calibration
    rows = kernel_errors(folder, options.fit)
    profile = folder / "vllm_rtx4090_llama31_8b" / "profile"
    if profile.is_dir():
        rows += step_errors(profile)
    if (path := folder / "splitwise_perf_model" / "perf_model.csv").is_file():
        rows += splitwise_errors(path)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def kernel_errors(folder: Path, fit: bool) -> list[dict[str, Any]]:
    """Errors of each device's kernels, after a fit if ``fit``."""
    measured: dict[str, dict[str, data.Rows]] = {}
    if (tables := folder / "op_latency").is_dir():
        measured = {name: data.kernels(tables, DEVICE_SPECS[name]) for name in data.MEASURED}
    if (profile := folder / "vllm_rtx4090_llama31_8b" / "profile").is_dir():
        measured["rtx-4090"] = data.profile_kernels(profile)
    rows = []
    for name, kinds in measured.items():
        device = DEVICE_SPECS[name]
        for kind, kernels in kinds.items():
            factors = getattr(device.efficiencies, kind)
            if fit:
                factors = fit_kernels(kind, kernels, device)
                print(f"{name:9} {kind}={factors}")
            times = np.array([row.seconds for row in kernels])
            rows.append(_row(name, kind, predict(factors, kernels, device), times))
        if name in data.MEASURED:
            reductions = data.reductions(tables, device)
            link = fit_link(reductions, device) if fit else device.link
            times = np.array([row.seconds for row in reductions])
            rows.append(_row(name, "all-reduce", predict_link(link, reductions), times))
    return rows


def predict(factors: Efficiency, kernels: data.Rows, device: DeviceSpec) -> np.ndarray:
    return np.array(
        [
            factors.seconds(row.flops, row.moved, device.flops, device.bandwidth) + row.rows * factors.row_s
            for row in kernels
        ]
    )


def fit_kernels(kind: str, kernels: data.Rows, device: DeviceSpec) -> Efficiency:
    """Factors with the least mean absolute log ratio of predicted and measured times."""
    sample = kernels[:: max(1, len(kernels) // MOST_SAMPLES)]
    times = np.array([row.seconds for row in sample])
    alike = len({row.rows for row in sample}) == 1
    names = [name for name in FREE[kind] if not (alike and name == "row_s")]

    def factors(logs: Sequence[float]) -> Efficiency:
        values = dict(zip(names, (float(value) for value in np.exp(logs)), strict=True))
        values["compute"] = min(values.get("compute", 1.0), 1.0)
        values["memory"] = min(values["memory"], 1.0)
        if "overlap" in values:
            values["overlap"] = max(values["overlap"], 1.0)
        return Efficiency(**values)

    def loss(logs: Sequence[float]) -> float:
        return float(np.abs(np.log(predict(factors(logs), sample, device) / times)).mean())

    first = np.log([FIRST[name] for name in names])
    options = {"maxfev": 1200, "xatol": 1e-3, "fatol": 1e-6}
    return rounded(factors(minimize(loss, first, method="Nelder-Mead", options=options).x))


def rounded(factors: Efficiency) -> Efficiency:
    return Efficiency(
        round(factors.compute, 3),
        round(factors.memory, 3),
        round(factors.start_s, 8),
        round(factors.overlap, 2),
        round(factors.row_s, 10),
    )


def predict_link(link: Link, rows: Sequence[data.Reduction]) -> np.ndarray:
    return np.array([link.all_reduce(row.message, row.devices) for row in rows])


def fit_link(rows: Sequence[data.Reduction], device: DeviceSpec) -> Link:
    times = np.array([row.seconds for row in rows])

    def link(logs: Sequence[float]) -> Link:
        bandwidth, start_s, device_s = (float(value) for value in np.exp(logs[:3]))
        return Link(bandwidth, start_s, device_s, max(float(logs[3]), 0.0))

    def loss(logs: Sequence[float]) -> float:
        return float(np.abs(np.log(predict_link(link(logs), rows) / times)).mean())

    starts = [
        [*np.log([bandwidth, 5e-6, 1e-6]), sharing] for bandwidth in (1e10, 1e11, 2e11) for sharing in (0, 1)
    ]
    options = {"maxfev": 3000, "maxiter": 3000}
    fits = [minimize(loss, start, method="Nelder-Mead", options=options) for start in starts]
    best = link(min(fits, key=lambda fit: float(fit.fun)).x)
    found = Link(
        float(f"{best.bandwidth:.3g}"),
        round(best.start_s, 8),
        round(best.device_s, 8),
        round(best.sharing, 2),
    )
    print(f"{device.name:9} {found}")
    return found


def step_errors(profile: Path) -> list[dict[str, Any]]:
    """Errors of whole steps of Llama-3.1-8B on an RTX 4090 against the layer profile."""
    measured = ProfileTimes.load(profile)
    roofline = RooflineTimes(MODEL_SPECS["llama-3.1-8b"], DEVICE_SPECS["rtx-4090"])
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    decodes = [StepRows(n, n * length, (), n) for n in sizes for length in (64, 256, 1024, 2048)]
    prefills = [
        StepRows(0, 0, ((chunk, before),), 1)
        for chunk in (64, 256, 512, 1024, 2048)
        for before in (0, 1024, 4096)
    ]
    mixed = [StepRows(n, n * 512, ((chunk, 0),), n + 1) for n in (8, 32) for chunk in (128, 512, 1024)]
    rows = []
    for kind, steps in (("decode steps", decodes), ("prefill steps", prefills), ("mixed steps", mixed)):
        found = np.array([roofline.step_time(step) for step in steps])
        rows.append(_row("rtx-4090", kind, found, np.array([measured.step_time(step) for step in steps])))
    return rows


def splitwise_errors(path: Path) -> list[dict[str, Any]]:
    """Errors of prompt and token times of Llama-2-70B; only the measured ones have an engine's overhead."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    model = MODEL_SPECS["llama-2-70b"]
    for row in data.splitwise(path):
        if (name := SPLITWISE_DEVICES.get(row["hardware"])) is None:
            continue
        times = RooflineTimes(model, DEVICE_SPECS[name], row["tp"])
        batch, prompt = row["batch"], row["prompt"]
        first = times.step_time(StepRows(0, 0, ((prompt, 0),) * batch, batch))
        token = times.decode_times(batch, batch * (prompt + 1), row["output"]).mean()
        kinds = (("prompt", first, row["prompt_s"]), ("token", token, row["token_s"]))
        for kind, predicted, measured in kinds:
            found.setdefault((name, f"splitwise {kind} tp={row['tp']}"), []).append((predicted, measured))
    return [_row(*key, *np.array(pairs).T) for key, pairs in sorted(found.items())]


def _row(device: str, kind: str, predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    ratio = predicted / measured
    error = np.abs(ratio - 1)
    return {
        "device": device,
        "kind": kind,
        "count": len(measured),
        "median_error": float(np.median(error)),
        "p90_error": float(np.percentile(error, 90)),
        "median_ratio": float(np.median(ratio)),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("device", "kind", "measured", "median error", "90th percentile", "predicted / measured")
    for row in rows:
        errors = (f"{row['median_error']:.1%}", f"{row['p90_error']:.1%}", f"{row['median_ratio']:.2f}")
        table.add_row(row["device"], row["kind"], str(row["count"]), *errors)
    Console().print(table)


if __name__ == "__main__":
    main()
