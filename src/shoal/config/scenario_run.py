"""``prepare``: converts a scenario into a simulation: engine specs, step times, requests, report facts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from shoal.cluster.manager.dispatch import dispatch_named
from shoal.config.scenario import Scenario, ScenarioService
from shoal.config.scenario_facts import state_facts, subject
from shoal.config.scenario_migrations import check_data_parallel, deaths_of, migrations_of
from shoal.config.scenario_pool import Deployment, capacity, plan_pools
from shoal.core import ConfigError, Request
from shoal.forecast import StepRows, StepTimes, measured_device, measured_model, read_meta
from shoal.forecast.latency_sources import FitLatency, Latency, ProfileLatency, RooflineLatency, step_times
from shoal.forecast.model_spec import ModelSpec
from shoal.kvcache import SCALE_BYTES, scales_of
from shoal.measure import RunRecord
from shoal.simulate import (
    ClosedLoop,
    EngineSpec,
    MigrationSpec,
    OpenLoop,
    ServiceSpec,
    Simulation,
    Watch,
)
from shoal.workload import build_workload

_STEPS_AT_ONCE = 1 << 18
"""Decode steps timed at once; bounds the memory for long outputs."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A scenario that is ready to run."""

    scenario: Scenario
    engine: EngineSpec
    requests: Sequence[Request]
    facts: Mapping[str, str]
    """Facts for the head of a report, by name."""
    subject: str
    """Models, devices and load, for the title of a report."""
    models: Mapping[str, ModelSpec | None]
    """Model by service; None: not known."""
    migrations: MigrationSpec
    ranks: int = 1
    """Data-parallel ranks; above 1 they are the only engine."""

    def with_times(self, change: Callable[[StepTimes], StepTimes]) -> "PreparedRun":
        """The same run with changed step times."""
        services = {
            name: replace(service, times=change(service.times))
            for name, service in self.engine.services.items()
        }
        return replace(self, engine=replace(self.engine, services=services))

    def run(
        self,
        *,
        skip_ahead: bool = True,
        spans: bool = False,
        progress: Callable[[int], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> RunRecord:
        """Simulate. spans: record every step, for a timeline.

        progress: called with the number of finished requests. stop: returns whether to end early.
        """
        clients = self.scenario.workload.clients
        grouped = self.ranks > 1
        simulation = Simulation(
            [self.engine] * (self.ranks if grouped else self.scenario.engines),
            OpenLoop(self.requests) if clients is None else ClosedLoop(self.requests, clients),
            dispatch=None if grouped else dispatch_named(self.scenario.dispatch),
            deaths=None if grouped else deaths_of(self.scenario),
            migrations=None if grouped else self.migrations,
            lock_step=grouped,
            batching=self.scenario.batching,
            fleet=None if grouped else self.scenario.fleet,
            watch=Watch(skip_ahead=skip_ahead, sample_s=self.scenario.sample_s, spans=spans),
        )
        run = simulation.run(self.scenario.title, self.facts, progress, stop)
        return replace(run, subject=self.subject, clients=clients)


def prepare(scenario: Scenario) -> PreparedRun:
    """Read traces and latency models, and plan the pools; raises ConfigError for conflicting settings."""
    latencies = {service.name: _latency(service, scenario) for service in scenario.services}
    deployments = {
        service.name: _deployment(service, latencies[service.name], scenario.kv_cache.dtype == "int8")
        for service in scenario.services
    }
    ranks = _ranks(scenario, list(deployments.values()))
    times = {name: step_times(name, latency, deployments[name].model) for name, latency in latencies.items()}
    pools = plan_pools(scenario, deployments)
    workload = build_workload(scenario.workload, list(times), scenario.kv_cache.block_size)
    requests = workload.requests
    contexts = {
        service.name: service.context_tokens or capacity(pools.layout, service.name)
        for service in scenario.services
    }
    means = {
        name: mean_request(requests, name, min(context, capacity(pools.layout, name)))
        for name, context in contexts.items()
    }
    services = {
        service.name: ServiceSpec(
            times=times[service.name],
            context_tokens=contexts[service.name],
            slo=service.slo,
            execution_s=service.execution_s
            or _mean_time_alone(
                times[service.name], means[service.name], scenario.scheduler.max_batched_tokens
            ),
            quota=service.quota,
            starvation_s=service.starvation_s,
            weights=_weights_owner(service.name, deployments),
            weight_bytes=deployments[service.name].weight_bytes,
            pinned=service.pin,
        )
        for service in scenario.services
    }
    engine = EngineSpec(
        services=services,
        layout=pools.layout,
        scheduler=scenario.scheduler,
        host=pools.host,
        host_bytes_per_s=scenario.kv_cache.swap_bytes_per_s,
        prefix_caching=scenario.kv_cache.prefix_caching,
        weights=scenario.weights,
        fetch_bytes_per_s=_fetch_bytes_per_s(deployments),
        fetch_slowdown=scenario.weights.slowdown,
    )
    facts = state_facts(scenario, latencies, deployments, engine, pools, means, workload)
    models = {name: deployment.model for name, deployment in deployments.items()}
    return PreparedRun(
        scenario=scenario,
        engine=engine,
        requests=requests,
        facts=facts,
        subject=subject(scenario, deployments, requests),
        models=models,
        migrations=migrations_of(scenario, pools),
        ranks=ranks,
    )


def mean_request(requests: Sequence[Request], service: str, room: int) -> tuple[int, int] | None:
    """Mean prompt and output length of a service's requests, in whole tokens; None without requests.

    room: maximum tokens of prompt and output together, at which outputs end. Requests that do not fit are
    excluded; if none fits, the mean request is the longest prompt that does, and one output token.
    """
    service_requests = [request for request in requests if request.service == service]
    served = [
        (len(request.prompt), min(_output_tokens(request), room - len(request.prompt)))
        for request in service_requests
        if len(request.prompt) + max(1, request.sampling.max_tokens or 1) <= room
    ]
    if not served:
        return (max(1, room - 1), 1) if service_requests else None
    prompts, outputs = zip(*served, strict=True)
    return round(fmean(prompts)), max(1, round(fmean(outputs)))


def time_alone(times: StepTimes, prompt_tokens: int, output_tokens: int, max_batched_tokens: int) -> float:
    """Seconds of a request that runs alone: its prompt in chunks, then one step per token."""
    seconds = 0.0
    for number in range(ceil(prompt_tokens / max_batched_tokens)):
        before = number * max_batched_tokens
        count = min(max_batched_tokens, prompt_tokens - before)
        sampled = int(before + count == prompt_tokens)
        rows = (
            StepRows(1, before + 1, (), sampled)
            if count == 1
            else StepRows(0, 0, ((count, before),), sampled)
        )
        seconds += times.step_time(rows)
    for done in range(0, output_tokens - 1, _STEPS_AT_ONCE):
        steps = min(_STEPS_AT_ONCE, output_tokens - 1 - done)
        seconds += float(times.decode_times(1, prompt_tokens + 1 + done, steps).sum())
    return seconds


def _ranks(scenario: Scenario, deployments: Sequence[Deployment]) -> int:
    """Number of data-parallel ranks; raises ConfigError for services that cannot share devices."""
    degrees = sorted({deployment.tp for deployment in deployments})
    if len(degrees) > 1:
        raise ConfigError(
            f"latency: services of one engine share its devices, but tp is {' and '.join(map(str, degrees))}"
        )
    ranks = max(deployment.ranks for deployment in deployments)
    if ranks > 1 and scenario.engines > 1:
        raise ConfigError("latency.data_parallel: a group of ranks is one engine; leave out engines")
    if ranks > 1:
        check_data_parallel(scenario)
    return ranks


def _weights_owner(name: str, deployments: Mapping[str, Deployment]) -> str | None:
    """The first service on the same model, which shares its weights; None: the model is not known."""
    own = deployments[name]
    if own.model is None:
        return None
    return next(
        first
        for first, other in deployments.items()
        if (other.weights, other.model) == (own.weights, own.model)
    )


def _fetch_bytes_per_s(deployments: Mapping[str, Deployment]) -> float | None:
    """Rate at which weights come to the devices; None: it is not known."""
    devices = {deployment.device for deployment in deployments.values()}
    rates = [device.host_bytes_per_s for device in devices if device is not None]
    return min(rates, default=None)


def _mean_time_alone(times: StepTimes, mean: tuple[int, int] | None, max_batched_tokens: int) -> float | None:
    return None if mean is None else time_alone(times, *mean, max_batched_tokens)


def _output_tokens(request: Request) -> int:
    limits = (request.true_output_tokens, request.sampling.max_tokens)
    return min((limit for limit in limits if limit is not None), default=1)


def _latency(service: ScenarioService, scenario: Scenario) -> Latency:
    latency = service.latency or scenario.latency
    if latency is None:
        raise ConfigError(
            f"latency: nothing says how long steps of service {service.name} take; write {{fit: FILE}}, "
            "{profile: FOLDER} or {roofline: {model: llama-3.1-8b, device: a100-80}}, or give the flags "
            "--model and --device"
        )
    return latency


def _deployment(service: ScenarioService, latency: Latency, int8_kv: bool) -> Deployment:
    """The service's model and device; raises ConfigError if service and latency have different models."""
    place = latency.roofline if isinstance(latency, RooflineLatency) else latency
    timed, device = (None, None) if isinstance(place, FitLatency) else (place.model, place.device)
    model = service.model or timed
    if isinstance(place, ProfileLatency):
        meta = read_meta(place.profile)
        model, device = model or measured_model(meta), device or measured_device(meta)
    if model is not None and timed is not None and model != timed:
        raise ConfigError(
            f"service {service.name} runs {model.name}, but its latency is that of {timed.name}; leave the "
            "model out of latency, or give the service a latency of its own"
        )
    if model is not None:
        model = in_dtype(model, service.dtype)
    if model is not None and int8_kv:
        model = replace(model, kv_bytes_each=1 + scales_of(model.head_dim) * SCALE_BYTES / model.head_dim)
    ranks = place.data_parallel if isinstance(place, ProfileLatency) else 1
    weights = None if model is None else service.model_name or model.name
    return Deployment(model=model, weights=weights, device=device, tp=place.tp, int8_kv=int8_kv, ranks=ranks)


def in_dtype(model: ModelSpec, dtype: str) -> ModelSpec:
    """The model with weights and KV in ``dtype``; "auto": as it is."""
    if dtype == "auto":
        return model
    size = _BYTES[dtype]
    return replace(model, weight_bytes_each=size, kv_bytes_each=size)
