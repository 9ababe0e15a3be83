"""Reads scenarios: every key of a scenario file, and the flags that go over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.config.scenario import (
    INCIDENTS,
    LARGEST_ENGINES,
    SHORTEST_SAMPLE_S,
    Incident,
    Scenario,
    ScenarioPool,
    ScenarioService,
    no_engine,
)
from shoal.config.scenario_flags import lay_over
from shoal.config.scenario_kinds import (
    FilePath,
    ModelShape,
    Shares,
    arrivals_kind,
    lengths_kind,
    located,
)
from shoal.config.scenario_latency import latency_kind
from shoal.config.scenario_migrations import engine_link_section
from shoal.config.sections import Key, Section, UnknownKey, section_of
from shoal.config.services import check_name, goal_kinds
from shoal.config.setting_tree import Node, Scalar, Table, place_of, problem, read_yaml
from shoal.config.settings import elsewhere, scheduler_section
from shoal.config.value_kinds import Choice, Kind, Maybe, Several, as_table, integer, number, seconds
from shoal.core import ConfigError, slo_problem
from shoal.workload import FORMATS, AtOnce, Poisson, Replay, WorkloadOptions, guess_format
from shoal.workload.rows import LARGEST_REQUESTS

_NO_WORKLOAD = (
    "workload: missing; say what arrives, as in `workload: {lengths: sharegpt, rate: 4, requests: 1000}` or "
    "`workload: {trace: FILE}`, or with flags: --workload sharegpt --rate 4 --requests 1000, or --trace FILE"
)


@dataclass(frozen=True, slots=True)
class WorkloadSection(Section):
    """The workload, and ``rate``: requests per second, whatever says when they come."""

    def read(self, node: Node, path: str) -> WorkloadOptions:
        """The workload, with its arrivals at the rate that was written."""
        fields = self.read_fields(node, path)
        rate = fields.pop("rate", None)
        options: WorkloadOptions = self.build(fields, node, path)
        if rate is None:
            return options
        try:
            return _at_rate(options, rate)
        except ConfigError as error:
            raise problem(place_of(node, "rate"), f"{path}.rate", str(error)) from None


def _at_rate(options: WorkloadOptions, rate: float) -> WorkloadOptions:
    """The workload with ``rate`` requests per second in the mean; raises ConfigError where that cannot be."""
    if options.clients is not None:
        raise ConfigError("clients send when they are answered, at no rate; leave out rate or clients")
    if options.time_scale != 1:
        raise ConfigError("give rate or time_scale, not both")
    arrivals = options.arrivals
    if isinstance(arrivals, AtOnce):
        raise ConfigError("requests that come at once have no rate; leave out rate or arrivals")
    if isinstance(arrivals, Replay) or (arrivals is None and _timed(options)):
        return replace(options, arrivals=Replay(rate=rate))
    return replace(options, arrivals=Poisson(rate) if arrivals is None else replace(arrivals, rate=rate))  # type: ignore[type-var]


def _timed(options: WorkloadOptions) -> bool:
    """Whether the workload's trace says when requests come."""
    if options.trace is None:
        return False
    chosen = options.format or guess_format(options.trace)
    return chosen is not None and FORMATS[chosen].timed


@dataclass(frozen=True, slots=True)
class ScenarioServiceSection(Section):
    """A service; with only a model it may be that model's name alone."""

    folder: Path = Path()
    """Where relative paths start."""

    def read(self, node: Node, path: str) -> ScenarioService:
        """The service, named after its model where no name was written."""
        if isinstance(node, Scalar) and node.text is not None:
            node = Table({"model": node}, node.where, {"model": node.where})
        fields = self.read_fields(node, path)
        if not fields.get("name"):
            if fields.get("model") is None:
                raise problem(
                    node.where, f"{path}.name", "missing; write a name, or a model that gives it one"
                )
            fields["name"] = fields["model"].name
        check_name(fields["name"], place_of(node, "name"), path)
        written = as_table(node, path).entries.get("model")
        if isinstance(written, Scalar) and written.text is not None:
            file = located(written.text, written.where, self.folder)
            fields["model_name"] = str(file.resolve()) if file.exists() else written.text
        service = ScenarioService(**fields)
        # Where no execution time is written, the workload gives one.
        if found := slo_problem(service.slo, service.execution_s or 1.0):
            goal, wrong = found
            raise problem(place_of(node, "slo", goal), f"{path}.slo.{goal}", wrong)
        return service


@dataclass(frozen=True, slots=True)
class ScenarioSection(Section):
    """The top of the file."""

    def read(self, node: Node, path: str) -> Scenario:
        """The whole scenario."""
        _require_device(node)
        fields = self.read_fields(node, path)
        if "scheduler" in fields:
            fields["scheduler"], fields["preset"] = fields["scheduler"]
        _check_incidents(fields, node)
        scenario: Scenario = self.build(fields, node, path)
        names = _names(scenario.services, node)
        for name in scenario.workload.services or ():
            if name not in names:
                where = place_of(node, "workload", "services", name)
                raise problem(
                    where, "workload.services", f"no service {name!r}; there are {', '.join(names)}"
                )
        return scenario


def _check_incidents(fields: Mapping[str, Any], node: Node) -> None:
    """Raise ConfigError with the line of an incident of an engine that is not there."""
    engines = fields.get("engines", 1)
    for key, what in INCIDENTS.items():
        for at, incident in enumerate(fields.get(key, ())):
            if incident.engine >= engines:
                where = place_of(node, key, at, "engine")
                raise problem(where, f"{key}[{at}].engine", no_engine(incident, what, engines))


def _require_device(node: Node) -> None:
    """Raise ConfigError for --model without a device, in the words of flags."""
    latency = node.entries.get("latency") if isinstance(node, Table) else None
    roofline = latency.entries.get("roofline") if isinstance(latency, Table) else None
    if isinstance(roofline, Table) and roofline.where == "--model" and "device" not in roofline.entries:
        raise ConfigError(
            "--model needs a device whose data sheet gives its step times: write --device, such as a100-80"
        )


def _names(services: Sequence[ScenarioService], node: Node) -> list[str]:
    """The services' names; raises ConfigError where there are none, or two alike."""
    if not services:
        raise problem(place_of(node, "services"), "services", "name at least one, or leave the key out")
    names: list[str] = []
    for index, service in enumerate(services):
        if service.name in names:
            raise problem(
                place_of(node, "services", index),
                f"services[{index}].name",
                f"there is already a service named {service.name!r}; give each a name of its own",
            )
        names.append(service.name)
    return names


def scenario_section(folder: Path = Path()) -> Section:
    """Every key of a scenario; ``folder`` is where relative paths start."""
    latency = latency_kind(folder)
    rules: dict[tuple[type, str], Any] = {
        **goal_kinds(),
        (ScenarioService, "model"): Maybe(ModelShape(folder)),
        (ScenarioService, "latency"): Maybe(latency),
        (ScenarioService, "context_tokens"): Maybe(integer(1)),
        (ScenarioService, "execution_s"): Maybe(seconds(above=0)),
        (ScenarioService, "quota"): integer(1),
        (ScenarioPool, "tokens"): Maybe(integer(1)),
        (ScenarioPool, "blocks"): Maybe(integer(1)),
        (ScenarioPool, "utilisation"): number(above=0, maximum=1),
        (ScenarioPool, "block_size"): integer(1, 4096),
        (ScenarioPool, "swap_bytes_per_s"): number(above=0),
        (Scenario, "latency"): Maybe(latency),
        (Scenario, "engines"): integer(1, LARGEST_ENGINES),
        (Scenario, "dispatch"): Choice(DISPATCH_NAMES),
        (Scenario, "link"): Maybe(engine_link_section()),
        (Incident, "engine"): integer(0),
        (Scenario, "scheduler"): scheduler_section(offline=True),
        (Scenario, "sample_s"): seconds(minimum=SHORTEST_SAMPLE_S),
        (Scenario, "workload"): _workload_section(folder),
    }
    service = section_of(ScenarioService, rules, {"context_tokens": "context"})
    keys = tuple(
        replace(key, default="the model's name") if key.name == "name" else key
        for key in service.keys
        if key.name != "model_name"
    )
    rules[Scenario, "services"] = Several(ScenarioServiceSection(ScenarioService, keys, folder=folder))
    plain = section_of(Scenario, rules)
    return ScenarioSection(Scenario, tuple(key for key in plain.keys if key.name not in ("preset", "title")))


def _workload_section(folder: Path) -> Section:
    count: Kind = Maybe(integer(1))
    rules: dict[tuple[type, str], Kind] = {
        (WorkloadOptions, "trace"): Maybe(FilePath(folder)),
        (WorkloadOptions, "format"): Maybe(Choice(tuple(FORMATS))),
        (WorkloadOptions, "lengths"): Maybe(lengths_kind()),
        (WorkloadOptions, "arrivals"): Maybe(arrivals_kind()),
        (WorkloadOptions, "time_scale"): number(above=0),
        (WorkloadOptions, "services"): Maybe(Shares()),
        (WorkloadOptions, "requests"): Maybe(integer(1, LARGEST_REQUESTS)),
        **{(WorkloadOptions, name): count for name in ("max_tokens", "clients")},
    }
    plain = section_of(WorkloadOptions, rules)
    return WorkloadSection(WorkloadOptions, (*plain.keys, Key("rate", "rate", Maybe(number(above=0)), None)))


def _check_model(table: Table, folder: Path) -> None:
    """Raise ConfigError for an unknown model, before what else is missing hides that."""
    node: Node | None = table
    for key in ("latency", "roofline", "model"):
        node = node.entries.get(key) if isinstance(node, Table) else None
    if node is not None:
        Maybe(ModelShape(folder)).read(node, "latency.roofline.model")


def load_scenario(*, file: Path | None = None, flags: Table | None = None) -> Scenario:
    """The scenario in ``file``, with ``flags`` over it; raises ConfigError for the first mistake.

    Relative paths in the file start at its folder. A flag also replaces what it cannot stand beside: a trace
    the file's lengths and arrivals, a rate its clients, one size of the pool the others.
    """
    table = read_yaml(file) if file else Table({}, "", {})
    if flags is not None:
        table = lay_over(table, flags)
    folder = file.parent if file else Path()
    _check_model(table, folder)
    if "workload" not in table.entries:
        raise problem("" if file is None else str(file), "", _NO_WORKLOAD)
    section = scenario_section(folder)
    try:
        scenario: Scenario = section.read(table, "")
    except UnknownKey as error:
        raise ConfigError(f"{error}{elsewhere(error.key, section)}") from None
    return replace(scenario, title=file.stem) if file else scenario
