"""What hybrid migration buys, by link bandwidth and prefill budget, on the real engines (Mell, section V)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.mell.setup import DEVICES, PAPER, model_on_device
from experiments.mell.workload import mell_requests
from experiments.parallel import map_points
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.options import PackingOptions
from shoal.cluster.packing import MigrationBudgets
from shoal.core import Request, SamplingParams, SyntheticPrompt
from shoal.core.cluster import Link
from shoal.core.metrics import percentile
from shoal.forecast import RooflineTimes
from shoal.forecast.device_specs import device_spec
from shoal.forecast.model_spec import model_spec
from shoal.kvcache import plan_layout
from shoal.measure import RunRecord
from shoal.schedule import Aggressive, Fcfs, SchedulerOptions
from shoal.simulate import EngineSpec, MigrationSpec, OpenLoop, ServiceSpec, Simulation, Watch
from shoal.simulate.kv_shape import kv_shape

NAME = "mell-hybrid"
MODEL = "llama2-7b"
BLOCK_TOKENS = 16
ENGINES = 24
RATE = 0.5
SECONDS, QUICK_SECONDS = 150.0, 60.0
EPOCH_S = 1.0
LATENCY_S = 1e-4
BANDWIDTHS = (0.125e9, 1.25e9, 16e9)
"""Bytes per second: 1 and 10 Gbit/s, PCIe 4."""
PREFILL_BUDGETS: Sequence[int | None] = (0, 4_000, None)
"""Tokens that an engine recomputes in an epoch; None: any."""
QUICK_BANDWIDTHS = BANDWIDTHS[1:2]


@dataclass(frozen=True, slots=True)
class _Point:
    bandwidth: float | None
    """Of each engine's link; None: KV is not sent."""
    prefill_tokens: int | None
    seconds: float


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [_Point(None, budget, seconds) for budget in PREFILL_BUDGETS[1:]]
    points += [
        _Point(bandwidth, budget, seconds)
        for bandwidth in effort.choose(BANDWIDTHS, QUICK_BANDWIDTHS)
        for budget in PREFILL_BUDGETS
    ]
    rows = []
    for point, metrics in zip(points, map_points(effort, NAME, measure, points), strict=True):
        config: dict[str, Value] = {
            "bandwidth": point.bandwidth,
            "prefill_budget": point.prefill_tokens,
        }
        rows.append(Row(config=config, metrics=metrics))
    return Result(name=NAME, paper=PAPER + ", section V", assumptions=ASSUMPTIONS, rows=rows)


def measure(point: _Point) -> dict[str, Value]:
    name, device_name = DEVICES[MODEL]
    model, device, deployed = model_spec(name), device_spec(device_name), model_on_device(MODEL)
    engine = EngineSpec(
        services={name: ServiceSpec(times=RooflineTimes(model, device))},
        layout=plan_layout(
            {name: kv_shape(model, 1, int8=False)},
            memory_bytes=deployed.capacity * deployed.token_bytes,
            block_size=BLOCK_TOKENS,
            kind="merged",
        ),
        scheduler=SchedulerOptions(order=Fcfs(), admission=Aggressive(watermark=1.0)),
        prefix_caching=False,
    )
    # What is sent in an epoch takes at most an epoch.
    sent = None if point.bandwidth is None else round(point.bandwidth * EPOCH_S)
    budgets = MigrationBudgets(engine_bytes=sent, prefill_tokens=point.prefill_tokens)
    link = None if point.bandwidth is None else Link(point.bandwidth, LATENCY_S)
    simulation = Simulation(
        [engine] * ENGINES,
        OpenLoop(_requests(point.seconds, deployed.capacity, name)),
        dispatch=dispatch_named("mell"),
        watch=Watch(sample_s=EPOCH_S),
        migrations=MigrationSpec(link=link, packing=PackingOptions(epoch_s=EPOCH_S, budgets=budgets)),
    )
    return _figures(simulation.run(), point.seconds)


def _requests(seconds: float, capacity: int, service: str) -> list[Request]:
    return [
        Request(
            id=request.id,
            service=service,
            prompt=SyntheticPrompt(request.prompt_tokens),
            sampling=SamplingParams(max_tokens=request.output_tokens),
            arrival_ns=round(request.arrival_s * 1e9),
            true_output_tokens=request.output_tokens,
        )
        for request in mell_requests(RATE, seconds, 0, capacity)
    ]


def _figures(record: RunRecord, seconds: float) -> dict[str, Value]:
    done = {method: counts.get("done", 0) for method, counts in record.moves.items()}
    in_use: dict[int, int] = {}
    for sample in record.samples:
        in_use[sample.time_ns] = in_use.get(sample.time_ns, 0) + (sample.running > 0)
    counted = [engines for at_ns, engines in in_use.items() if at_ns <= seconds * 1e9]
    gaps = [row.mtpot_s for row in record.requests]
    return {
        "peak_devices": max(counted),
        "mean_devices": fmean(counted),
        "with_kv_per_s": done.get("live", 0) / seconds,
        "by_tokens_per_s": done.get("tokens", 0) / seconds,
        "preemptions_per_request": sum(row.preemptions for row in record.requests) / len(record.requests),
        "withdrawn": record.withdrawn,
        "mtpot_mean_s": fmean(gaps),
        "mtpot_p99_s": percentile(gaps, 99),
        "latency_mean_s": fmean(row.e2e_s for row in record.requests),
    }


ASSUMPTIONS = (
    "From the paper: LLaMA2-7B on RTX 4090, conversations ten times as long, links of 10 Gbit/s between "
    "machines and PCIe 4 within; a migration sends KV or recomputes it from tokens, within budgets.",
    f"The real engines, scheduler and manager, `mell`, an epoch of {EPOCH_S:g} s; {RATE:g} requests per "
    f"second for {SECONDS:.0f} s, the same in all rows. Every engine has a link of its own.",
    "The budget of a link is what it carries in an epoch. prefill_budget 0: KV alone; no bandwidth: tokens "
    "alone; else hybrid, KV first. mtpot: the largest gap between two tokens of a request.",
)

REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, section V",
    measures="migrations with KV, by tokens and both, against link bandwidths and prefill budgets",
    run=run,
)
