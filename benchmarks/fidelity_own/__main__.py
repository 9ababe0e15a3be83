"""Fidelity of the simulator to Shoal's own engine on this machine.

    python -m benchmarks.fidelity_own                          # 8 runs of 200 requests, about 10 minutes
    python -m benchmarks.fidelity_own --repeat 3 --json own.json
    python -m benchmarks.fidelity_own --requests 20 --presets vllm --cases "one service"
    python -m benchmarks.fidelity_own --threads 1 --cpu-time   # on a busy machine

Measures step times of the model as `shoal profile` does, and fits a curve to them. Then the same requests
(Poisson arrivals, ShareGPT's lengths scaled and capped) run in real time on the real engine in this process,
and in virtual time in the simulator, with the same KV pool and scheduler, and step times by the curve. The
simulation uses nothing of the runs. Mean E2E, TPOT and normalised latency should agree within 3%, mean TTFT
within 5%.

Machines drift, so the model is profiled before and after each group of runs, and both profiles are used.
Their difference is printed; smaller differences of results mean nothing. At two thirds of capacity, 1% slower
steps make a server about 2% slower. "At its pace" removes the machine's part: another simulation, with step
times scaled by those of the run within five seconds; what remains is scheduling, memory and queues. The last
table is of the roofline with the data sheet ``cpu`` alone. With --cpu-time, clocks count the CPU time of the
engine's thread, so that other processes matter less.

With --http, the requests of the first case also go to `shoal serve` under the first preset, over loopback
with the same number of threads; the additional time is the share of HTTP and of the API process, which uses
the same cores. It takes three minutes more.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.fidelity_own.http_run import run_http
from benchmarks.fidelity_own.pace import Jittered, Pace, Paced
from benchmarks.fidelity_own.report import (
    Comparison,
    drift_of,
    http_table,
    results_table,
    sheet_table,
    steps_table,
    to_json,
)
from benchmarks.fidelity_own.run import (
    Outcome,
    Setting,
    data_sheet_times,
    load,
    profile_model,
    run_engine,
    simulate,
)
from benchmarks.fidelity_own.workload import CASES, capacity, make_requests
from shoal.config.presets import PRESETS
from shoal.core import RequestRecord, ShoalError
from shoal.core.units import parse_size
from shoal.engine.build import default_threads
from shoal.execute.model.model_set import ModelSet
from shoal.forecast import CurveTimes, StepTimes, load_profile
from shoal.kvcache import plan_layout
from shoal.profile.fit import fit_serving
from shoal.profile.grid import GRIDS
from shoal.profile.measure import ServiceMeasurements

DEFAULT_PRESETS = "vllm,past-future,seallm-join,shoal"
GRID = replace(GRIDS["quick"], batches=(1,), slice_batches=(), slice_tokens=8, repeats=2)
"""Steps as in serving, without SCLS's equal batches."""
USUAL_JITTER = 0.03
"""Variation of step times from a file, relative."""

Records = Sequence[RequestRecord]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    """Settings, the model, and the profiles so far."""

    args: argparse.Namespace
    setting: Setting
    models: ModelSet
    profiles: list[ServiceMeasurements]

    def profile(self) -> None:
        """Measure step times again, unless a file gives them."""
        if self.args.profile is not None:
            return
        started = time.monotonic()
        grid = self.args.grid
        self.profiles.append(profile_model(self.setting, self.models, grid, lambda done, total: None))
        curve, report = fit_serving(self.profiles[-1:])
        log(
            f"profiled in {time.monotonic() - started:.0f} s: {report.samples} kinds of step, mean error "
            f"of the fit {report.mean_absolute_percent_error:.1f}%; one row decodes in "
            f"{1e3 * float(curve.decode_times(1, 100, 1)[0]):.1f} ms, 16 in "
            f"{1e3 * float(curve.decode_times(16, 1600, 1)[0]):.1f} ms"
        )

    def times(self, last: int) -> tuple[StepTimes, float]:
        """Step times by the last profiles or the file, and the relative error of the fit."""
        if self.args.profile is not None:
            profile = load_profile(self.args.profile)
            names = [name for name, _ in profile.models]
            return profile.times(self.args.model if self.args.model in names else names[0]), USUAL_JITTER
        curve, report = fit_serving(self.profiles[-last:])
        return curve, report.mean_absolute_percent_error / 100


def execution_of(times: StepTimes, case: str) -> dict[str, float]:
    """L^: seconds of each service's mean request alone, by the fitted times."""
    found = {}
    for name, lengths in CASES[case].items():
        drawn = lengths.sample(2_000, 0)
        prompt, output = (round(sum(side) / len(drawn)) for side in zip(*drawn, strict=True))
        if isinstance(times, CurveTimes):
            found[name] = times.execution_time(prompt, output)
        else:
            found[name] = float(times.decode_times(1, prompt, output).sum())
    return found


def measure_case(bench: Bench, case: str, seed: int) -> list[Comparison]:
    """Run all presets between two profiles, then simulate them with both."""
    args, setting, models = bench.args, bench.setting, bench.models
    before, _ = bench.times(1)
    execution_s = execution_of(before, case)
    layout = plan_layout(models.kv_shapes, memory_bytes=setting.kv_bytes, block_size=16, kind="merged")
    most = capacity(before, CASES[case], layout.merged_blocks * 16, 16)
    requests = make_requests(CASES[case], args.requests, args.load * most, seed)
    log(
        f"{case}: {args.load * most:.2f} requests/s, {args.load:.0%} of {most:.2f}; L^ "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in execution_s.items())
    )
    measured = {}
    for preset in args.presets:
        measured[preset] = run_engine(setting, models, preset, requests, execution_s)
        counts = measured[preset].counts
        log(f"  {preset}: {counts.end_s:.0f} s, {counts.preemptions} preemptions")
    bench.profile()
    times, share = bench.times(2)
    varied = [Jittered(times, share, np.random.default_rng((seed, n))) for n in range(args.varied)]

    sheet = data_sheet_times(setting)

    def simulated(preset: str, steps: StepTimes) -> Outcome:
        return simulate(setting, models, preset, requests, execution_s, steps)

    return [
        Comparison(
            case=case,
            preset=preset,
            seed=seed,
            measured=outcome,
            simulated=simulated(preset, times),
            paced=simulated(preset, Paced(times, Pace(times, outcome.steps, outcome.started_s))),
            varied=[simulated(preset, one) for one in varied],
            times=times,
            sheet=sheet,
            by_sheet=simulated(preset, sheet),
            execution_s=execution_s,
        )
        for preset, outcome in measured.items()
    ]


def measure_http(bench: Bench, done: Sequence[Comparison]) -> tuple[Records, Records]:
    """Repeat the first run in this process and then over HTTP."""
    first = done[0]
    arrivals = {one.request_id: one.arrival_ns for one in first.measured.records}
    requests = make_requests(CASES[first.case], len(arrivals), 1.0, first.seed)
    requests = [replace(one, arrival_ns=arrivals[one.id]) for one in requests]
    log(f"{first.case}, {first.preset}: in this process again, then over HTTP")
    inside = run_engine(bench.setting, bench.models, first.preset, requests, first.execution_s)
    return inside.records, run_http(bench.setting, first.preset, requests)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--kv-memory", type=parse_size, default="32MiB", help="KV pool of the runs")
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--load", type=float, default=0.65, help="share of the capacity, by the profile")
    parser.add_argument("--presets", type=_names(PRESETS), default=DEFAULT_PRESETS)
    parser.add_argument("--cases", type=_names(CASES), default=",".join(CASES))
    parser.add_argument("--repeat", type=int, default=1, help="rounds over everything, each another seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="take step times from `shoal profile --out FILE`")
    parser.add_argument("--repeats", type=int, default=GRID.repeats, help="of each step of a profile")
    parser.add_argument("--varied", type=int, default=4, help="simulations with steps varied by chance")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time; needs --threads 1")
    parser.add_argument("--http", action="store_true", help="also drive `shoal serve`, and show HTTP's share")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if args.cpu_time and (args.threads != 1 or args.http):
        parser.error("--cpu-time counts one thread of this process: give --threads 1 and no --http")
    args.grid = replace(GRID, repeats=args.repeats)
    return args


def _names(possible: Mapping[str, Any]):  # type: ignore[no-untyped-def]
    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in possible]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: possible are {', '.join(possible)}")
        return names

    return read


def main() -> None:
    args = parse()
    if args.cpu_time:
        import torch

        torch.set_num_threads(1)
    setting = Setting(args.model, args.dtype, args.kv_memory, args.threads, args.cpu_time)
    started = time.monotonic()
    try:
        bench = Bench(args, setting, load(setting), [])
        bench.profile()
        done = [
            one
            for repeat in range(args.repeat)
            for case in args.cases
            for one in measure_case(bench, case, args.seed + repeat)
        ]
        served = measure_http(bench, done) if args.http else None
    except ShoalError as error:
        log(str(error))
        raise SystemExit(1) from error
    console = Console(width=118)
    for case in args.cases:
        console.print(results_table(case, [one for one in done if one.case == case]))
    console.print(steps_table(done))
    console.print(sheet_table(done))
    drifts = [drift_of(one, other) for one, other in zip(bench.profiles, bench.profiles[1:], strict=False)]
    for number, drift in enumerate(drifts):
        console.print(f"drift: steps of profile {number + 2} against those of profile {number + 1}: {drift}")
    if served is not None:
        console.print(http_table(*served))
    console.print(f"{time.monotonic() - started:.0f} s in all; {args.model}, {args.threads} threads")
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(done, drifts, served), indent=1) + "\n")


if __name__ == "__main__":
    main()
