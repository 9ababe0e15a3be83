"""Small builders: services whose steps cost little, engines around them, and requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from shoal.cluster.manager.dispatch import DispatchPolicy
from shoal.core import Request, SamplingParams, StepPlan, SyntheticPrompt
from shoal.forecast import FittedTimes, LatencyModel, StepTimes
from shoal.kvcache import KVShape, LayerShape, PoolLayout, ServiceLayout
from shoal.measure import RunRecord
from shoal.schedule import Aggressive, Fcfs, SchedulerOptions, describe
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Source, Watch

TIMES = FittedTimes(
    LatencyModel(constant_s=8e-3, sequence_s=2e-5, token_s=4e-5, context_s=1.3e-7, work_s=1e-9)
)
PLAIN = SchedulerOptions(
    order=Fcfs(),
    admission=Aggressive(watermark=1.0),
    victim="newest",
    preemption_mode="recompute",
    preempt_for_waiting="never",
    starvation_s=1e6,
)


def make_layout(blocks: int, block_size: int, per_merged: Mapping[str, int]) -> PoolLayout:
    """``blocks`` merged blocks, of which each service's blocks are a part."""
    services = {
        name: ServiceLayout(
            service=name,
            shape=KVShape(dtype="float32", layers=(LayerShape(1, 8 + number, 8),)),
            stride_bytes=12 * 256 // count,
            blocks_per_merged=count,
            layers=(),
        )
        for number, (name, count) in enumerate(per_merged.items())
    }
    return PoolLayout("merged", block_size, 12 * 256, blocks, services)


def make_spec(
    blocks: int = 400,
    *,
    block_size: int = 4,
    per_merged: Mapping[str, int] | None = None,
    times: StepTimes = TIMES,
    context: int = 1 << 20,
    options: SchedulerOptions = PLAIN,
    prefix_caching: bool = True,
    **knobs: object,
) -> EngineSpec:
    """An engine; ``knobs`` replace those of ``options``."""
    per_merged = {"a": 1} if per_merged is None else per_merged
    layout = make_layout(blocks, block_size, per_merged)
    return EngineSpec(
        services={
            name: ServiceSpec(times=times, context_tokens=context, execution_s=1.0) for name in per_merged
        },
        layout=layout,
        scheduler=replace(options, **knobs),  # type: ignore[arg-type]
        host=layout,
        prefix_caching=prefix_caching,
    )


def make_request(
    number: int,
    prompt: int = 10,
    output: int = 5,
    *,
    at_s: float = 0.0,
    service: str = "a",
    hashes: Sequence[int] = (),
    max_tokens: int | None = None,
) -> Request:
    return Request(
        id=f"r{number}",
        service=service,
        prompt=SyntheticPrompt(prompt, tuple(hashes)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_ns=round(at_s * 1e9),
        true_output_tokens=output,
        seed=number,
    )


def make_workload(
    count: int,
    *,
    rate: float = 20.0,
    services: Sequence[str] = ("a",),
    block_size: int = 4,
    longest: int = 60,
    seed: int = 0,
) -> list[Request]:
    """Random lengths and arrivals; every third request shares the beginning of its prompt with others."""
    random = Random(seed)
    requests = []
    time_s = 0.0
    for number in range(count):
        time_s += random.expovariate(rate)
        prompt = random.randint(1, longest)
        own = [1_000_000 + number * 1_000 + at for at in range(prompt // block_size)]
        if number % 3 == 0:
            family = random.randint(0, 2)
            shared = [family * 1_000 + at for at in range(len(own) // 2)]
            own[: len(shared)] = shared
        output = random.choice((1, 1, 2, random.randint(1, longest), random.randint(1, longest)))
        requests.append(
            make_request(
                number,
                prompt,
                output,
                at_s=time_s,
                service=random.choice(services),
                hashes=own,
                max_tokens=output + random.randint(0, 30),
            )
        )
    return requests


def run(
    specs: Sequence[EngineSpec],
    requests: Sequence[Request] | Source,
    *,
    skip_ahead: bool = True,
    dispatch: DispatchPolicy | None = None,
    spans: bool = True,
    logged: bool = True,
) -> tuple[RunRecord, list[str]]:
    """The record of a simulation, and its schedule log unless it is not wanted."""
    log: list[str] = []

    def note(engine: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        log.append(f"{engine}: {describe(plan, made_ns, steps_ns)}")

    source = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    watch = Watch(skip_ahead=skip_ahead, sample_s=0.05, spans=spans)
    simulation = Simulation(specs, source, dispatch=dispatch, watch=watch, on_plan=note if logged else None)
    return simulation.run(), log
