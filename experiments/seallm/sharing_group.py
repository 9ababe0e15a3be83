"""One sharing group of SeaLLM: two services on two A800, shared or separate, under each scheduler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from experiments.seallm.workload import CONTEXT, Traffic, lengths_of, requests_of
from shoal.config.presets import PRESETS
from shoal.core import SLO
from shoal.execute.simulated import HOST_BYTES_PER_S
from shoal.forecast import StepRows, StepTimes
from shoal.forecast.device_specs import device_spec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec, model_spec
from shoal.forecast.roofline import RooflineTimes
from shoal.kvcache import KVShape, LayerShape, PoolLayout, plan_layout
from shoal.measure import RunRecord
from shoal.schedule import DoublingBudget, SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch

DEVICE = device_spec("a800")
GPUS = 2
BLOCK_TOKENS = 16
MEMORY_SHARE = 0.9
SLO_SCALE = 5.0
NEVER_S = 1e6

MODELS: Mapping[str, Mapping[str, str]] = {
    "chats": {"short-chat": "llama-2-7b", "long-chat": "llama-2-13b"},
    "chats+summaries": {"summary": "llama-2-7b", "chat": "llama-2-13b"},
}
"""Models by service, for each sharing group."""


@dataclass(frozen=True, slots=True)
class GroupSystem:
    scheduler: SchedulerOptions
    """Of each engine."""
    shares: bool = True
    """Whether both services have one engine over all GPUs."""
    fraction: float | None = None
    """Without sharing: each service's fixed part of the compute of all GPUs; None: a GPU for each service."""


def _published(preset: str) -> SchedulerOptions:
    return replace(PRESETS[preset].scheduler, starvation_s=NEVER_S)


_SEALLM = PRESETS["seallm"].scheduler
SYSTEMS: Mapping[str, GroupSystem] = {
    "vllm": GroupSystem(_published("vllm"), shares=False),
    "alpaserve": GroupSystem(_published("alpaserve")),
    "fcfs": GroupSystem(_published("vllm")),
    "muxserve": GroupSystem(_published("vllm"), shares=False, fraction=1 / GPUS),
    "round-robin": GroupSystem(_published("muxserve")),
    "fastserve": GroupSystem(PRESETS["fastserve"].scheduler),
    "seallm": GroupSystem(_SEALLM),
    "seallm-join": GroupSystem(PRESETS["seallm-join"].scheduler),
    "seallm-batch": GroupSystem(PRESETS["seallm-batch"].scheduler),
    "seallm-c-mu": GroupSystem(replace(_SEALLM, order=DoublingBudget(variant="c-mu"))),
    "shoal": GroupSystem(PRESETS["shoal"].scheduler),
}
"""By name: ``vllm`` has dedicated GPUs, ``muxserve`` shares in space, the rest in time, in one engine."""


@dataclass(frozen=True, slots=True)
class FractionOf:
    """Step times on a fixed fraction of a device's compute, above 0 and at most 1."""

    times: StepTimes
    """On the whole device."""
    fraction: float

    def step_time(self, rows: StepRows) -> float:
        return self.times.step_time(rows) / self.fraction

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of ``steps`` decode steps in a row."""
        return self.times.decode_times(sequences, context, steps) / self.fraction


def execution_times(group: str) -> dict[str, float]:
    """L^ by service: seconds of a request of mean lengths alone on one GPU."""
    found = {}
    for name, lengths in lengths_of(group).items():
        prompt, output = (round(sum(side) / len(side)) for side in zip(*lengths.pairs, strict=True))
        times = RooflineTimes(model_spec(MODELS[group][name]), DEVICE)
        prefill = times.step_time(StepRows(0, 0, ((prompt, 0),), 1))
        found[name] = prefill + float(times.decode_times(1, prompt + 1, max(1, output - 1)).sum())
    return found


def simulate(group: str, system: str, traffic: Traffic) -> RunRecord:
    """Simulate a system until all requests are answered."""
    execution_s = execution_times(group)
    source = OpenLoop(requests_of(group, traffic))
    watch = Watch(sample_s=3600.0)
    return Simulation(_engines(group, SYSTEMS[system], execution_s), source, watch=watch).run(system)


def _engines(group: str, system: GroupSystem, execution_s: Mapping[str, float]) -> list[EngineSpec]:
    models = {name: model_spec(model) for name, model in MODELS[group].items()}
    if system.shares:
        return [_engine(models, system.scheduler, execution_s, GPUS)]
    if system.fraction is None:
        return [_engine({name: model}, system.scheduler, execution_s, 1) for name, model in models.items()]
    # Both models' weights are on all GPUs; the remaining memory is split equally.
    left = _memory(models.values(), GPUS) // len(models)
    return [
        _engine({name: model}, system.scheduler, execution_s, GPUS, memory=left, fraction=system.fraction)
        for name, model in models.items()
    ]


def _engine(
    models: Mapping[str, ModelSpec],
    scheduler: SchedulerOptions,
    execution_s: Mapping[str, float],
    tp: int,
    memory: int | None = None,
    fraction: float = 1.0,
) -> EngineSpec:
    layout = _layout(models, _memory(models.values(), tp) if memory is None else memory)
    services = {}
    for name, model in models.items():
        times: StepTimes = RooflineTimes(model, DEVICE, tp)
        services[name] = ServiceSpec(
            times=times if fraction == 1 else FractionOf(times, fraction),
            context_tokens=CONTEXT,
            slo=SLO(e2e_scale=SLO_SCALE),
            execution_s=execution_s[name],
        )
    return EngineSpec(
        services=services,
        layout=layout,
        scheduler=scheduler,
        host=layout,
        # Each device has its own link to the host.
        host_bytes_per_s=tp * HOST_BYTES_PER_S,
    )


def _memory(models: Iterable[ModelSpec], tp: int) -> int:
    """Bytes for KV on all devices of an engine."""
    weights = sum(model.weight_bytes(tp) for model in models)
    return tp * (int(DEVICE.memory_bytes * MEMORY_SHARE) - weights)


def _layout(models: Mapping[str, ModelSpec], memory: int) -> PoolLayout:
    shapes = {
        name: KVShape(
            "float16",
            (LayerShape(model.kv_heads, model.head_dim, model.head_dim),) * model.layers,
        )
        for name, model in models.items()
    }
    return plan_layout(shapes, memory_bytes=memory, block_size=BLOCK_TOKENS)
