"""A plan as ``shoal.yaml`` of a server, and a server's ``shoal.yaml`` as a placement."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.cluster.options import EnginePlan
from shoal.config.presets import PRESETS
from shoal.config.scenario import Scenario, ScenarioService
from shoal.config.scheduler_yaml import plain, plain_section, scheduler_settings, to_yaml
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.config.setting_tree import parse_yaml
from shoal.config.settings import Config, scheduler_section, weights_section
from shoal.config.value_kinds import OrWord, seconds, size
from shoal.core import NO_GOALS, SLO, ConfigError, ModelUnavailable
from shoal.core.units import LONGEST_S
from shoal.models.resolve import check_model
from shoal.place.placement import Group, Placement
from shoal.plan.catalog import Catalogue
from shoal.plan.demand import Demand, Policies
from shoal.plan.placing import Candidate, whole_fleet
from shoal.schedule.weights_options import WeightsOptions


def server_settings(
    demand: Demand, scenario: Scenario, placed: Placement, policies: Policies
) -> dict[str, Any]:
    """The sections of ``shoal.yaml`` as plain values.

    One engine for each device with services; GPUs are numbered from 0 on one machine. Raises ConfigError for
    engines that span several devices, which servers do not support yet.
    """
    groups = [group for group in placed.groups if group.shares]
    spanning = [group for group in groups if group.tp > 1]
    if spanning:
        names = ", ".join(device.name for device in spanning[0].devices)
        raise ConfigError(
            f"engines that span several devices ({names}) cannot be served yet; write span: 1 in the "
            "catalogue"
        )
    numbers: dict[str, int] = defaultdict(int)
    devices = [_device(demand, group, numbers) for group in groups]
    placement = {
        service.name: [group.devices[0].name for group in groups if service.name in group.services]
        for service in demand.services
    }
    pool = scenario.kv_cache
    settings: dict[str, Any] = {
        "devices": devices,
        "placement": placement,
        "cluster": {"dispatch": policies.dispatch},
        "scheduler": scheduler_settings(policies.scheduler, scenario.preset),
        "services": [_service(service) for service in demand.services],
    }
    if scenario.weights.memory_bytes is not None:
        settings["weights"] = _weights(scenario.weights)
    kv_cache: dict[str, Any] = {}
    if pool.block_size != 16:
        kv_cache["block_size"] = pool.block_size
    if pool.layout not in (None, PRESETS[scenario.preset].layout):
        kv_cache["layout"] = pool.layout
    return settings | ({"kv_cache": kv_cache} if kv_cache else {})


def check_servable(scenario: Scenario, catalogue: Catalogue) -> None:
    """Raise ConfigError for what only simulations support: some schedulers, engines over several devices."""
    for kind in catalogue.devices:
        if kind.span > 1:
            raise ConfigError(
                f"kind {kind.name}: engines that span several devices cannot be served yet; leave out "
                "--out, or span where one device is enough"
            )
        if kind.engine is None:
            raise ConfigError(
                f"kind {kind.name}: nothing says what servers call such devices; write engine: cpu, or "
                "engine: cuda, or leave out --out"
            )
    text = to_yaml({"scheduler": scheduler_settings(scenario.scheduler, scenario.preset)})
    scheduler_section(offline=False).read(parse_yaml(text, "scenario").entries["scheduler"], "scheduler")


def missing_weights(demand: Demand) -> str | None:
    """A remark on models whose shapes are known but not their weights; None if a server finds all."""
    missing = []
    for service in demand.services:
        try:
            check_model(service.model_name or "")
        except ModelUnavailable:
            missing.append(str(service.model_name))
    if not missing:
        return None
    return (
        f"a server does not find {', '.join(dict.fromkeys(missing))}, which is known by its shape only: "
        "write the folder or hub id of weights as the service's model"
    )


def server_text(
    demand: Demand, scenario: Scenario, placed: Placement, policies: Policies, remarks: Sequence[str]
) -> str:
    """The text of ``shoal.yaml``, with remarks as comments at its head; raises as ``server_settings``."""
    head = "".join(f"# {remark}\n" for remark in remarks)
    return head + to_yaml(server_settings(demand, scenario, placed, policies))


def configured_candidate(name: str, config: Config[Any], demand: Demand) -> Candidate:
    """The placement and policies of a server's configuration, on the devices of the catalogue.

    Its engines are named after devices. Raises ConfigError for other names, for other services and another
    limit on weights than the scenario's, and for engines without enough memory.
    """
    devices = {device.name: device for device in demand.cluster(whole_fleet(demand)).devices}
    names = {service.name for service in demand.services}
    if (configured := {service.name for service in config.services}) != names:
        raise ConfigError(
            f"{name} has services {', '.join(sorted(configured))}, the scenario {', '.join(sorted(names))}"
        )
    parts = []
    for engine in config.engine_plans():
        if engine.name not in devices:
            raise ConfigError(
                f"{name}: there is no device {engine.name!r}, after which an engine is named; there are "
                f"{', '.join(devices)}"
            )
        device = devices[engine.name]
        _check_limit(name, engine, demand)
        own = [service.name for service in engine.options.services]
        if not demand.engines.memory.fits(own, device.memory_bytes, 1):
            raise ConfigError(
                f"{name}: engine {engine.name} has no memory for {', '.join(own)} and their longest requests"
            )
        parts.append(([device], own))
    policies = Policies(config.scheduler, config.cluster.dispatch)
    return Candidate(name, Placement.sharing(parts), policies)


def _check_limit(name: str, engine: EnginePlan, demand: Demand) -> None:
    written, simulated = engine.options.weights.memory_bytes, demand.engines.memory.weights_limit_bytes
    if written != simulated:
        raise ConfigError(
            f"{name}: engine {engine.name} has {_limit(written)}, the scenario {_limit(simulated)}; both "
            "need the same weights.memory"
        )


def _limit(num_bytes: int | None) -> str:
    return "no limit on weights" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB for weights"


def _device(demand: Demand, group: Group, numbers: dict[str, int]) -> dict[str, Any]:
    """The device of one engine; numbers: GPUs numbered so far, by type."""
    [device] = group.devices
    kind = next(kind for kind in demand.catalogue.devices if kind.name == device.kind)
    left = demand.engines.memory.left_bytes(group.services, device.memory_bytes, 1)
    settings: dict[str, Any] = {"device": "cpu", "name": device.name}
    if kind.engine != "cpu":
        settings["device"] = f"{kind.engine}:{numbers[kind.engine or '']}"
        numbers[kind.engine or ""] += 1
    elif kind.threads is not None:
        settings["threads"] = kind.threads
    return settings | {"kv_memory": plain(size(), left)}


def _weights(options: WeightsOptions) -> dict[str, Any]:
    """The section ``weights``, without the bandwidth, which is that of simulated devices."""
    return plain_section(weights_section(), replace(options, bandwidth=None))


def _service(service: ScenarioService) -> dict[str, Any]:
    settings: dict[str, Any] = {"name": service.name, "model": service.model_name}
    if service.dtype != "auto":
        settings["dtype"] = service.dtype
    if service.context_tokens is not None:
        settings["max_model_len"] = service.context_tokens
    if service.slo != NO_GOALS:
        settings["slo"] = plain_section(section_of(SLO, goal_kinds()), service.slo)
    if service.execution_s is not None:
        settings["execution"] = plain(seconds(), service.execution_s)
    if service.quota != ScenarioService(name="").quota:
        settings["quota"] = service.quota
    if service.starvation_s is not None:
        settings["starvation"] = plain(OrWord(seconds(), LONGEST_S), service.starvation_s)
    if service.pin:
        settings["pin"] = True
    return settings
