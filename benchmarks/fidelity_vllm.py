"""Fidelity of the simulator to recorded vLLM runs.

    python -m benchmarks.fidelity_vllm [--calibration FOLDER] [--roofline] [--fit N]

A folder holds ``measured/requests.jsonl``, ``measured/meta.json`` (the run's blocks, batch limits, devices,
asynchronous scheduling) and ``profile/``, the tables of the GPU's kernels. The requests are simulated with
Shoal's scheduler, and TTFT, TPOT and E2E printed next to the measured ones, with the effect of 1% of step
time. Nothing is fitted to the timings, except the host's overhead with ``--fit N``, to the first N requests.
``--roofline`` takes step times from data sheets instead of the tables.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.config import PRESETS, prepare
from shoal.config.scenario import Scenario, ScenarioPool, ScenarioService
from shoal.config.scenario_measured import compare_run, fit_scenario, with_overhead
from shoal.core import ConfigError
from shoal.core.units import LONGEST_S
from shoal.forecast import measured_device, measured_model, read_meta
from shoal.forecast.latency_sources import Latency, ProfileLatency, RooflineLatency, RooflineOptions
from shoal.schedule import Aggressive
from shoal.workload import WorkloadOptions

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent.parent / "shared" / "calibration" / "vllm_rtx4090_llama31_8b"


def scenario_of(folder: Path, run: dict[str, Any], roofline: bool) -> Scenario:
    """The scenario of a run by its meta.json; raises ConfigError if it cannot be simulated."""
    engine, cache, scheduler = run["engine_kwargs"], run["kv_cache"], run["scheduler"]
    tp, ranks = engine["tensor_parallel_size"], engine.get("data_parallel_size", 1)
    grouped = ranks > 1 and engine.get("enable_expert_parallel", False)
    meta = read_meta(folder / "profile")
    model, device = measured_model(meta), measured_device(meta)
    latency: Latency = ProfileLatency(
        profile=folder / "profile", tp=tp, data_parallel=ranks if grouped else 1
    )
    if roofline:
        if grouped:
            raise ConfigError(f"{folder}: ranks that divide experts are simulated from tables only")
        if device is None:
            raise ConfigError(
                f"{folder / 'profile'}: a device without data sheet on record: {meta.get('gpu')}"
            )
        latency = RooflineLatency(roofline=RooflineOptions(device=device, tp=tp))
    options = replace(
        PRESETS["vllm"].scheduler,
        admission=Aggressive(watermark=1.0),
        starvation_s=LONGEST_S,
        max_running=scheduler["max_num_seqs"],
        max_batched_tokens=scheduler["max_num_batched_tokens"],
        depth=2 if scheduler.get("async_scheduling") else 1,
    )
    return Scenario(
        workload=WorkloadOptions(trace=folder / "measured" / "requests.jsonl", format="requests"),
        services=(ScenarioService(name="default", model=model, context_tokens=engine["max_model_len"]),),
        latency=latency,
        engines=1 if grouped else ranks,
        dispatch="least-requests",
        kv_cache=ScenarioPool(
            blocks=cache["num_gpu_blocks"],
            block_size=cache["block_size"],
            prefix_caching=cache["enable_prefix_caching"],
        ),
        scheduler=options,
        preset="vllm",
        title=folder.name,
    )


def compare(console: Console, scenario: Scenario, log: Path, fit_requests: int | None) -> None:
    """Simulate, and print both runs."""
    if fit_requests is not None:
        overhead, _ = fit_scenario(scenario, log, fit_requests)
        scenario = with_overhead(scenario, overhead)
        console.print(
            f"overhead fitted to {fit_requests} requests: {overhead.step_s * 1e6:.1f} us a step, "
            f"{overhead.layer_s * 1e6:.1f} us a layer with prompt tokens"
        )
    prepared = prepare(scenario)
    run = prepared.run()
    depth = scenario.scheduler.max_in_flight
    preemptions = sum(engine.preemptions for engine in run.engines)
    console.print(f"{scenario.title}, depth {depth}: {preemptions} preemptions in simulation")
    console.print(compare_run(prepared, run, log).grid().to_rich())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=DEFAULT)
    parser.add_argument("--roofline", action="store_true", help="step times from data sheets")
    parser.add_argument(
        "--fit", type=int, metavar="N", help="fit the host's overhead to the first N requests"
    )
    arguments = parser.parse_args()
    folder = arguments.calibration
    log, about = folder / "measured" / "requests.jsonl", folder / "measured" / "meta.json"
    missing = [str(path) for path in (log, about, folder / "profile") if not path.exists()]
    if missing:
        raise SystemExit(
            f"there is no {missing[0]}; point --calibration at a folder with measured/ and profile/"
        )
    console = Console()
    try:
        scenario = scenario_of(folder, json.loads(about.read_text(encoding="utf-8")), arguments.roofline)
        for depth in sorted({1, scenario.scheduler.max_in_flight}):
            of_depth = replace(scenario, scheduler=replace(scenario.scheduler, depth=depth))
            compare(console, of_depth, log, arguments.fit)
    except KeyError as error:
        raise SystemExit(f"{about} does not say {error}") from None
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
