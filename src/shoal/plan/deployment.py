"""A plan as the configuration of a server."""

from collections import defaultdict
from typing import Any

from shoal.cluster.place.placement import Group
from shoal.config.kinds import seconds, size
from shoal.config.nodes import parse_yaml
from shoal.config.presets import PRESETS
from shoal.config.scenario import Scenario, ScenarioService
from shoal.config.scheduler_yaml import plain, plain_section, scheduler_settings, to_yaml
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.config.settings import scheduler_section
from shoal.core import NO_GOALS, SLO, ConfigError, ModelUnavailable
from shoal.models.resolve import check_model
from shoal.plan.capacity import Offer
from shoal.plan.catalog import Catalogue
from shoal.plan.demand import Demand


def server_settings(demand: Demand, scenario: Scenario, offer: Offer) -> dict[str, Any]:
    """The sections of ``shoal.yaml``, as plain values.

    One engine for each device that has services, devices of GPUs numbered from 0 on one machine. Raises
    ConfigError for engines that span several devices, which no server has yet.
    """
    groups = [group for group in offer.placement.groups if group.shares]
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
        "cluster": {"dispatch": offer.policies.dispatch},
        "scheduler": scheduler_settings(offer.policies.scheduler, scenario.preset),
        "services": [_service(service) for service in demand.services],
    }
    kv_cache: dict[str, Any] = {}
    if pool.block_size != 16:
        kv_cache["block_size"] = pool.block_size
    if pool.layout not in (None, PRESETS[scenario.preset].layout):
        kv_cache["layout"] = pool.layout
    return settings | ({"kv_cache": kv_cache} if kv_cache else {})


def check_servable(scenario: Scenario, catalogue: Catalogue) -> None:
    """Raise ConfigError for what only simulations have: some schedulers, and engines over several devices."""
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
    written = to_yaml({"scheduler": scheduler_settings(scenario.scheduler, scenario.preset)})
    scheduler_section(offline=False).read(parse_yaml(written, "scenario").entries["scheduler"], "scheduler")


def known_by_shape(demand: Demand) -> list[str]:
    """Models whose shapes are on record, but which no server finds by these names."""
    found = []
    for service in demand.services:
        try:
            check_model(service.model_name or "")
        except ModelUnavailable:
            found.append(str(service.model_name))
    return list(dict.fromkeys(found))


def _device(demand: Demand, group: Group, numbers: dict[str, int]) -> dict[str, Any]:
    """One engine's device; numbers: how many GPUs there are before it."""
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
    return settings
