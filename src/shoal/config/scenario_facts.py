"""Facts of a scenario in words, for the head of its report."""

from collections.abc import Mapping, Sequence

from shoal.config.batching import batching_section
from shoal.config.fleet import fleet_section
from shoal.config.presets import PRESETS
from shoal.config.scenario import Scenario
from shoal.config.scenario_kinds import arrivals_kind, lengths_kind
from shoal.config.scenario_latency import link_section, overhead_section
from shoal.config.scenario_migrations import engine_link_section
from shoal.config.scenario_pool import Deployment, Pools, capacity
from shoal.config.scheduler_yaml import in_words
from shoal.config.settings import weights_section
from shoal.core import Request
from shoal.core.units import format_byte_rate, format_duration
from shoal.forecast import NO_OVERHEAD
from shoal.forecast.latency_sources import FitLatency, Latency, ProfileLatency, RooflineOptions
from shoal.simulate import EngineSpec
from shoal.workload import Workload, WorkloadOptions

Means = Mapping[str, tuple[int, int] | None]
"""Mean prompt and output length by service."""


def state_facts(
    scenario: Scenario,
    latencies: Mapping[str, Latency],
    deployments: Mapping[str, Deployment],
    engine: EngineSpec,
    pools: Pools,
    means: Means,
    workload: Workload,
) -> dict[str, str]:
    """The facts by name, in display order."""
    facts = {"workload": _workload(scenario.workload, len(workload.requests))}
    if workload.note:
        facts["trace"] = workload.note
    for name, latency in latencies.items():
        facts[f"service {name}"] = _service(latency, deployments[name])
    for service in scenario.services:
        alone = engine.services[service.name].execution_s
        if alone is not None:
            facts[f"{service.name} alone"] = _time_alone(
                alone, service.execution_s is None, means[service.name]
            )
    facts["engines"] = str(scenario.engines) + (f", {scenario.dispatch}" if scenario.engines > 1 else "")
    if scenario.batching is not None:
        facts["batches"] = batching_section(offline=True).show(scenario.batching)
    if scenario.fleet is not None:
        facts["fleet"] = fleet_section().show(scenario.fleet)
    if incidents := _incidents(scenario):
        facts["incidents"] = incidents
    if scenario.link is not None:
        facts["link"] = engine_link_section().show(scenario.link)
    facts["scheduler"] = _scheduler(scenario)
    if scenario.scheduler.admission.reads_limits and scenario.workload.max_tokens is None:
        facts["output limit"] = (
            "none, so the admission sets aside what context and pool allow: few requests run at a time; "
            "write workload.max_tokens"
        )
    if engine.weights.memory_bytes is not None:
        facts["weights"] = _weights(engine)
    facts["KV pool"] = _pool(engine, pools)
    if scenario.scheduler.preemption_mode == "swap":
        facts["swap"] = _swap(pools)
    return facts


def subject(scenario: Scenario, deployments: Mapping[str, Deployment], requests: Sequence[Request]) -> str:
    """Models, devices and load in a few words, such as ``llama-3.1-8b on 2 a100-80, 20 requests/s``."""
    models = {each.model.name if each.model is not None else name for name, each in deployments.items()}
    kinds = {each.device.name for each in deployments.values() if each.device is not None}
    first = next(iter(deployments.values()))
    count = scenario.engines * first.tp * first.ranks
    devices = some(sorted(kinds)) if kinds else "device" if count == 1 else "devices"
    return f"{some(sorted(models))} on {count} {devices}, {_load(scenario.workload, requests)}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The names, or of many the first ones and how many more there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def _load(options: WorkloadOptions, requests: Sequence[Request]) -> str:
    """How many clients, or requests per second."""
    if options.clients is not None:
        return f"{options.clients:,} client{'s' if options.clients > 1 else ''}"
    times = [request.arrival_ns for request in requests]
    span_s = (max(times, default=0) - min(times, default=0)) / 1e9
    if not span_s:
        return f"{len(requests):,} requests at once" if len(requests) != 1 else "1 request"
    rate = getattr(options.arrivals, "rate", None) if options.time_scale == 1 else None
    return f"{(len(requests) - 1) / span_s if rate is None else rate:.3g} requests/s"


def _incidents(scenario: Scenario) -> str:
    """Drained engines and engines that die."""
    words = [
        f"engine {each.engine} is drained after {format_duration(each.at_s)}" for each in scenario.drains
    ]
    words += [f"engine {each.engine} dies after {format_duration(each.at_s)}" for each in scenario.deaths]
    return ", ".join(words)


def _workload(options: WorkloadOptions, requests: int) -> str:
    parts = []
    if options.trace is not None:
        parts.append(f"trace {options.trace.name}")
    if options.lengths is not None:
        parts.append(f"{lengths_kind().show(options.lengths)} lengths")
    if options.clients is not None:
        parts.append(f"{options.clients} clients, each waiting for its answer")
    elif options.arrivals is not None:
        parts.append(arrivals_kind().show(options.arrivals))
    if options.time_scale != 1:
        parts.append(f"times x {options.time_scale:g}")
    return ", ".join([*parts, f"{requests:,} requests", f"seed {options.seed}"])


def _service(latency: Latency, deployment: Deployment) -> str:
    model = "" if deployment.model is None else f"{deployment.model.name}: "
    sharing = f", tp {deployment.tp}" if deployment.tp > 1 else ""
    sharing += f", {deployment.ranks} data-parallel ranks" if deployment.ranks > 1 else ""
    if isinstance(latency, FitLatency):
        return f"{model}step times fitted by shoal profile, {latency.fit.name}{sharing}"
    if isinstance(latency, ProfileLatency):
        folder = "/".join(latency.profile.parts[-2:])
        return f"{model}step times from measured layers, {folder}{sharing}{_link_and_overhead(latency)}"
    roofline = latency.roofline
    rest = sharing + _link_and_overhead(roofline)
    return f"{model}step times from the data sheet of {roofline.device.name}{rest}"


def _link_and_overhead(latency: ProfileLatency | RooflineOptions) -> str:
    """The link and the host's overhead, if they are set."""
    link = "" if latency.link is None else f", link {link_section().show(latency.link)}"
    if latency.overhead == NO_OVERHEAD:
        return link
    return f"{link}, overhead {overhead_section().show(latency.overhead)}"


def _time_alone(seconds: float, computed: bool, mean: tuple[int, int] | None) -> str:
    if not computed or mean is None:
        return f"{seconds:.4g} s, as written"
    return f"{seconds:.4g} s, computed for the mean request of {mean[0]:,} + {mean[1]:,} tokens"


def _scheduler(scenario: Scenario) -> str:
    """The preset, and differences from it."""
    changes = in_words(scenario.scheduler, PRESETS[scenario.preset].scheduler)
    return f"preset {scenario.preset}" + (f", {changes}" if changes else "")


def _pool(engine: EngineSpec, pools: Pools) -> str:
    layout = pools.layout
    room = " or ".join(
        f"{capacity(layout, name):,} tokens" + (f" of {name}" if len(engine.services) > 1 else "")
        for name in engine.services
    )
    size = f"{layout.total_bytes / 2**30:.1f} GiB for " if pools.sized else ""
    int8 = ", int8" if any(view.shape.int8 for view in layout.services.values()) else ""
    caching = "" if engine.prefix_caching else ", no prefix caching"
    return f"{size}{room}, blocks of {layout.block_size}, {layout.kind}{int8}{caching}"


def _weights(engine: EngineSpec) -> str:
    """The memory for weights, of how many bytes, and how they come."""
    assert engine.weights.memory_bytes is not None
    sizes = {each.weights or name: each.weight_bytes for name, each in engine.services.items()}
    rate = min(filter(None, (engine.fetch_bytes_per_s, engine.weights.bandwidth)))
    [policy] = [key.kind for key in weights_section().keys if key.name == "policy"]
    slower = f", steps x {engine.fetch_slowdown:g} meanwhile" if engine.fetch_slowdown > 1 else ""
    return (
        f"{engine.weights.memory_bytes / 2**30:.1f} GiB for {sum(sizes.values()) / 2**30:.1f} GiB, "
        f"policy {policy.show(engine.weights.policy)}, fetched at {format_byte_rate(rate)}/s{slower}"
    )


def _swap(pools: Pools) -> str:
    if pools.host is None:
        return "none, because the size of KV is not known: preempted requests are computed again"
    return f"{pools.host.total_bytes / 2**30:.1f} GiB of host memory"
