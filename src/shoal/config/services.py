"""Reads ``services``: model, name, data type, chat template, sampling defaults, SLO, quota of each."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.sections import Rules, Section, section_of
from shoal.config.setting_tree import Node, Scalar, Table, below, place_of, problem
from shoal.config.value_kinds import Choice, Maybe, OrWord, Several, Template, Text, integer, number, seconds
from shoal.core import SLO, ConfigError, SamplingDefaults, Service, service_problem, slo_problem
from shoal.core.service import LARGEST_SEED
from shoal.core.slo import LARGEST_SCALE
from shoal.core.units import LONGEST_S

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True, slots=True)
class ServiceSection(Section):
    """Reads a service; its name is optional, and with only a model it may be the model's name alone."""

    def read(self, node: Node, path: str) -> Service:
        """The service; its name defaults to the model's."""
        if isinstance(node, Scalar) and node.text is not None:
            node = Table({"model": node}, node.where, {"model": node.where})
        fields = self.read_fields(node, path)
        model = fields["model"]
        name, named, of = model.partition("=")
        if named and not fields.get("name") and default_name(model) == model:
            written = f"--service {model}, or in a file {{name: {name}, model: {of}}}"
            raise problem(node.where, path, f"a name before a model is written {written}")
        fields["name"] = fields.get("name") or default_name(model)
        check_name(fields["name"], node.where, path)
        service = Service(**fields)
        if found := slo_problem(service.slo, service.execution_s):
            goal, wrong = found
            raise problem(place_of(node, "slo", goal), below(path, f"slo.{goal}"), wrong)
        if found := service_problem(service):
            key, wrong = found
            raise problem(place_of(node, key), below(path, key), wrong)
        return service


def service_section(template_folder: Path | None) -> Section:
    """The keys of a service.

    template_folder: base of relative paths of templates; None: templates are text, never read from files.
    """
    rules: Rules = {
        (Service, "dtype"): Choice(DTYPES),
        (Service, "weights_seed"): integer(0, LARGEST_SEED),
        (Service, "max_model_len"): Maybe(integer(1)),
        (Service, "chat_template"): Maybe(Template(template_folder)),
        (Service, "execution_s"): Maybe(seconds(above=0)),
        (Service, "quota"): integer(1),
        (Service, "starvation_s"): Maybe(OrWord(seconds(above=0), LONGEST_S)),
        (Service, "idle_after_s"): OrWord(seconds(above=0), None),
        (SamplingDefaults, "temperature"): Maybe(number(0, 100)),
        (SamplingDefaults, "top_p"): Maybe(number(above=0, maximum=1)),
        (SamplingDefaults, "top_k"): Maybe(integer(-1, 2**31 - 1)),
        (SamplingDefaults, "min_p"): Maybe(number(0, 1)),
        (SamplingDefaults, "repetition_penalty"): Maybe(number(0.01, 100)),
        **goal_kinds(),
    }
    plain = section_of(Service, rules)
    keys = tuple(
        replace(key, default="the model's name") if key.name == "name" else key for key in plain.keys
    )
    return ServiceSection(Service, keys)


def read_added_service(settings: Table) -> tuple[Service, tuple[str, ...] | None]:
    """A service to add to running engines, and the engines in its key ``engines``; None: all."""
    entries = dict(settings.entries)
    engines = entries.pop("engines", None)
    node = Table(entries, settings.where, settings.key_places)
    service: Service = service_section(None).read(node, "")
    return service, None if engines is None else Maybe(Several(Text())).read(engines, "engines")


def goal_kinds() -> Rules:
    """Kinds of the SLO's keys."""
    return {
        (SLO, "ttft_s"): Maybe(seconds(above=0)),
        (SLO, "tpot_s"): Maybe(seconds(above=0)),
        (SLO, "mtpot_s"): Maybe(seconds(above=0)),
        (SLO, "e2e_s"): Maybe(seconds(above=0)),
        (SLO, "e2e_scale"): Maybe(number(above=0, maximum=LARGEST_SCALE)),
    }


def check_name(name: str, where: str, path: str) -> None:
    """Raise ConfigError for a service name that flags cannot express."""
    if not name.isprintable() or any(c.isspace() or c in "=," for c in name):
        raise problem(where, below(path, "name"), f"use no spaces, '=' or ',' in a name, got {name!r}")


def default_name(model: str) -> str:
    """The default name of a service: an alias or hub id as it is, the last part of a path."""
    is_path = model.startswith((".", "/", "~")) or model.endswith(".gguf") or os.path.exists(model)
    if not is_path:
        return model
    return Path(model).expanduser().resolve().name.removesuffix(".gguf").replace(" ", "-")


def check_services(services: Sequence[Any]) -> None:
    """Raise ConfigError without services, or for duplicate names."""
    if not services:
        raise ConfigError(
            "services: name at least one model, as in `shoal serve smollm2`, "
            "or `services: [{name: chat, model: smollm2}]` in the configuration file"
        )
    seen: set[str] = set()
    for index, service in enumerate(services):
        if service.name in seen:
            raise ConfigError(
                f"services[{index}].name: there is already a service named {service.name!r}; "
                f"give each its own name, as in --service {service.name}-2={service.model}"
            )
        seen.add(service.name)
