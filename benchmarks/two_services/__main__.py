"""Two services (short chats, long texts) on one engine under many policies and loads, in real time.

    python -m benchmarks.two_services --lengths sharegpt_first_pair_qwen.csv
    python -m benchmarks.two_services --lengths ... --loads 0.5 --policies vllm,shoal --seconds 10
    python -m benchmarks.two_services --lengths ... --services 1 --policies vllm,shoal,shoal-never
    python -m benchmarks.two_services --redraw results.json --plot results.png

Lengths come from a table of conversations (CSV with columns prompt_tokens and output_tokens), whose short and
long outputs become the two services; with --services 1 the same requests go to one service. Arrivals are
Poisson with bursts; all policies get the same requests, one policy after another for each load. First, each
service is measured alone; its mean time is L^, the unit of latencies. Then a full engine with FCFS gives the
capacity; loads are multiples of it. Policies are presets; `shoal-...`, the default with one change; and
`dedicated`, two FCFS engines with half of the memory and one core each.

It needs a quiet machine: next to another busy process two threads wait for each other, and steps take many
times as long. Use --threads 1 there.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.two_services.outcome import Run
from benchmarks.two_services.policies import DEDICATED, POLICIES
from benchmarks.two_services.report import Figures, figures_of, save_picture, show, title_of
from benchmarks.two_services.run import DedicatedEngines, Setting, build, load, request_of, run_shared
from benchmarks.two_services.workload import (
    MIXED,
    SERVICES,
    Arrival,
    Length,
    make_workload,
    mean_output,
    prompt_of,
    read_lengths,
    service_of,
    typical,
)
from shoal.core import ShoalError
from shoal.core.units import parse_size
from shoal.engine import Engine
from shoal.engine.build import default_threads
from shoal.execute.model.model_set import ModelSet

TABLE = Path("../shared/traces/sharegpt_lengths/sharegpt_first_pair_qwen.csv")
DEFAULT_POLICIES = (
    "vllm", "alpaserve", "fastserve", "muxserve", "round-robin", "seallm", "seallm-join", "seallm-batch",
    "shoal", "dedicated",
)  # fmt: skip
OUTSTANDING = 64
"""Requests in the engine while its capacity is measured."""

Lengths = Mapping[str, Sequence[Length]]


@dataclass(frozen=True)
class Calibration:
    """execution_s: L^, seconds of each service's mean request alone. capacity: requests/s."""

    execution_s: dict[str, float]
    capacity: float

    def require(self, names: Sequence[str]) -> "Calibration":
        """Itself; exits if it is of other services."""
        if set(self.execution_s) != set(names):
            raise SystemExit(
                f"--calibration is of {', '.join(self.execution_s)}, but the services are {', '.join(names)};"
                " give one measured with the same --services"
            )
        return self


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_alone(engine: Engine, service: str, lengths: Sequence[Length], rounds: int) -> float:
    """Mean seconds of one request at a time, over requests of typical lengths."""
    rng = np.random.default_rng(0)
    times = []
    for number, one in enumerate([lengths[0], *typical(lengths, rounds)]):
        arrival = Arrival(f"alone-{number}", service, 0.0, prompt_of(one.prompt, rng), one.output)
        started = engine.now_ns()
        engine.submit(request_of(arrival, one.output, started))
        while engine.busy:
            engine.step()
        times.append((engine.now_ns() - started) / 1e9)
    return float(np.mean(times[1:]))  # the first only warms up


def measure_capacity(engine: Engine, lengths: Lengths, args: argparse.Namespace, max_tokens: int) -> float:
    """Requests per second of a full engine, after a third of the time."""
    arrivals = _endless(lengths, args)
    for _ in range(OUTSTANDING):
        engine.submit(request_of(next(arrivals), max_tokens, engine.now_ns()))
    started = engine.now_ns()
    begun, tokens = None, 0
    while (now := engine.now_ns()) < started + args.calibrate * 1e9:
        if begun is None and now >= started + args.calibrate / 3 * 1e9:
            begun = now
        for event in engine.step():
            tokens += len(event.tokens) if begun is not None else 0
            if event.finish is not None:
                engine.submit(request_of(next(arrivals), max_tokens, engine.now_ns()))
    seconds = (engine.now_ns() - (begun or started)) / 1e9
    return tokens / seconds / mean_output(lengths, args.chat_share)


def _endless(lengths: Lengths, args: argparse.Namespace) -> Iterator[Arrival]:
    rng = np.random.default_rng((args.seed, 99))
    for number in count():
        kind = SERVICES[int(rng.random() >= args.chat_share)]
        one = lengths[kind][int(rng.integers(len(lengths[kind])))]
        service = service_of(kind, args.services)
        yield Arrival(f"full-{number}", service, 0.0, prompt_of(one.prompt, rng), one.output)


def calibrate(setting: Setting, models: ModelSet, lengths: Lengths, args: argparse.Namespace) -> Calibration:
    log("measuring requests of each kind alone")
    engine = build(setting, models, "vllm", setting.names, args.threads)
    execution_s = {
        kind: measure_alone(engine, service_of(kind, args.services), lengths[kind], args.alone)
        for kind in SERVICES
    }
    engine.close()
    if args.services == 1:
        shares = zip((args.chat_share, 1 - args.chat_share), execution_s.values(), strict=True)
        execution_s = {MIXED: sum(share * seconds for share, seconds in shares)}
    log(f"measuring the capacity of a full engine, {args.calibrate:g} s")
    engine = build(setting, models, "vllm", setting.names, args.threads)
    capacity = measure_capacity(engine, lengths, args, setting.max_tokens)
    engine.close()
    return Calibration(execution_s, capacity)


def run_all(
    args: argparse.Namespace,
    lengths: Lengths,
    calibration: Calibration,
    run: Callable[[str, Sequence[Arrival]], Run],
) -> list[Figures]:
    """Run all policies at a load before the next load, so that noise hits all of them."""
    runs: dict[tuple[float, str], list[Run]] = {}
    planned = [(r, x, p) for r in range(args.repeats) for x in args.loads for p in args.policies]
    started = time.monotonic()
    for number, (repeat, x, policy) in enumerate(planned):
        arrivals = make_workload(
            lengths,
            rate=x * calibration.capacity,
            chat_share=args.chat_share,
            seconds=args.seconds,
            seed=args.seed + repeat,
            services=args.services,
        )
        if not any(one.at_s >= args.warm_up for one in arrivals):
            raise SystemExit(f"load {x:g}: no request arrives after the warm-up; give --seconds more")
        each_s = (time.monotonic() - started) / number if number else args.seconds + args.drain / 2
        log(
            f"[{number + 1}/{len(planned)}] load {x:g}, {policy}: {len(arrivals)} requests; "
            f"about {each_s * (len(planned) - number) / 60:.1f} min to go"
        )
        done = run(policy, arrivals)
        runs.setdefault((x, policy), []).append(done)
        overall = figures_of(policy, x, [done], calibration.execution_s)[0]
        log(
            f"    {done.ended_s:.0f} s, latency / L^ {overall.normalised:.2f}, "
            f"p99 {overall.normalised_p99:.1f}, within goal {overall.attainment:.0%}, "
            f"largest gap p99 {overall.gap_p99_s:.2f} s, unfinished {overall.unfinished}"
        )
    return [
        one
        for (x, policy), done in runs.items()
        for one in figures_of(policy, x, done, calibration.execution_s)
    ]


def measure(args: argparse.Namespace) -> tuple[Calibration, list[Figures]]:
    lengths = read_lengths(args.lengths, args.scale)
    for name, group in lengths.items():
        prompt, output = np.mean([(one.prompt, one.output) for one in group], axis=0)
        log(f"{name}: {len(group)} conversations, mean prompt {prompt:.0f} and output {output:.0f} tokens")
    longest = max(one.output for group in lengths.values() for one in group)
    memory, times = args.kv_memory, (args.seconds, args.drain, args.warm_up)
    names = tuple(dict.fromkeys(service_of(kind, args.services) for kind in SERVICES))
    setting = Setting(args.model, args.dtype, memory, 2 * longest, *times, names)
    dedicated = DedicatedEngines(setting) if DEDICATED in args.policies else None
    try:
        models = load(setting, names, args.threads)
        if args.calibration is not None:
            report = json.loads(args.calibration.read_text())
            calibration = Calibration(**report["calibration"]).require(names)
        else:
            calibration = calibrate(setting, models, lengths, args)
        alone = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in calibration.execution_s.items())
        log(f"L^: {alone}; capacity {calibration.capacity:.2f} requests/s")
        setting = replace(setting, execution_s=calibration.execution_s)

        def run(policy: str, arrivals: Sequence[Arrival]) -> Run:
            if policy == DEDICATED and dedicated is not None:
                return dedicated.run(setting, arrivals)
            return run_shared(setting, models, policy, arrivals, args.threads)

        return calibration, run_all(args, lengths, calibration, run)
    finally:
        if dedicated is not None:
            dedicated.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, default=TABLE, help="table of prompt and output lengths")
    parser.add_argument("--services", type=int, choices=(1, 2), default=2, help="1: all requests to one")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of the shared engine")
    parser.add_argument("--kv-memory", type=parse_size, default="64MiB", help="KV pool, such as 64MiB")
    parser.add_argument("--scale", type=float, default=0.25, help="lengths are multiplied by this")
    parser.add_argument("--chat-share", type=float, default=0.75, help="share of requests that are chats")
    parser.add_argument("--loads", type=_numbers, default="0.3,0.7,1.0,1.4", help="multiples of the capacity")
    parser.add_argument("--policies", type=_policies, default=",".join(DEFAULT_POLICIES))
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each run")
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="first seconds, whose requests do not count"
    )
    parser.add_argument("--drain", type=float, default=60.0, help="seconds to finish what has arrived")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over everything, each another seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", type=int, default=8, help="requests that measure L^ of a service")
    parser.add_argument("--calibrate", type=float, default=36.0, help="seconds that measure the capacity")
    parser.add_argument("--calibration", type=Path, help="take L^ and capacity from an earlier --json file")
    parser.add_argument("--redraw", type=Path, help="run nothing; show an earlier --json file")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the figures here (png, svg or pdf)")
    args = parser.parse_args()
    if args.services == 1 and DEDICATED in args.policies:
        parser.error(
            f"--services 1: {DEDICATED} is an engine for each of two services; name other --policies"
        )
    return args


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: possible are {', '.join(POLICIES)}")
    return names


def main() -> None:
    args = parse()
    if args.redraw is not None:
        report = json.loads(args.redraw.read_text())
    else:
        if not args.lengths.exists():
            log(f"{args.lengths}: no such file; name a table of conversation lengths with --lengths")
            raise SystemExit(2)
        try:
            calibration, results = measure(args)
        except ShoalError as error:
            log(str(error))
            raise SystemExit(1) from error
        kept = {name: value for name, value in vars(args).items() if not isinstance(value, Path | None)}
        report = {
            "settings": kept,
            "calibration": asdict(calibration),
            "results": [asdict(r) for r in results],
        }
    results = [Figures(**one) for one in report["results"]]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    show(results)
    if args.plot:
        save_picture(results, args.plot, title_of(report))


if __name__ == "__main__":
    main()
