"""``load_scenario``: reads a scenario from a YAML file and flags, with all keys and checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.config.batching import batching_section, with_preset
from shoal.config.fleet import fleet_section
from shoal.config.presets import PRESETS
from shoal.config.scenario import (
    INCIDENTS,
    LARGEST_ENGINES,
    SHORTEST_SAMPLE_S,
    Incident,
    Scenario,
    ScenarioPool,
    ScenarioService,
    ScenarioWeights,
    unknown_engine_message,
)
from shoal.config.scenario_flags import apply_flags
from shoal.config.scenario_kinds import (
    FilePath,
    ModelShape,
    Shares,
    arrivals_kind,
    lengths_kind,
    resolve_path,
)
from shoal.config.scenario_latency import latency_kind
from shoal.config.scenario_migrations import engine_link_section
from shoal.config.sections import Key, Section, UnknownKey, section_of
from shoal.config.services import check_name, goal_kinds
from shoal.config.setting_tree import Node, Scalar, Table, place_of, problem, read_yaml
from shoal.config.settings import check_batches, hint_other_section, scheduler_section, weights_section
from shoal.config.value_kinds import Choice, Kind, Maybe, OrWord, Several, as_table, integer, number, seconds
from shoal.core import ConfigError, slo_problem
from shoal.core.units import LONGEST_S
from shoal.workload import FORMATS, AtOnce, Poisson, Replay, WorkloadOptions, guess_format
from shoal.workload.rows import LARGEST_REQUESTS

_NO_WORKLOAD = (
    "workload: missing; say what arrives, as in `workload: {lengths: sharegpt, rate: 4, requests: 1000}` or "
    "`workload: {trace: FILE}`, or with flags: --workload sharegpt --rate 4 --requests 1000, or --trace FILE"
)


@dataclass(frozen=True, slots=True)
class WorkloadSection(Section):
    """Reads the workload, with a key ``rate``: requests per second, for any arrival process or trace."""

    def read(self, node: Node, path: str) -> WorkloadOptions:
        """The workload, with its arrivals at the given rate."""
        fields = self.read_fields(node, path)
        rate = fields.pop("rate", None)
        options: WorkloadOptions = self.build(fields, node, path)
        if rate is None:
            return options
        try:
            return at_rate(options, rate)
        except ConfigError as error:
            raise problem(place_of(node, "rate"), f"{path}.rate", str(error)) from None


def at_rate(options: WorkloadOptions, rate: float) -> WorkloadOptions:
    """The workload with a mean of ``rate`` requests per second; raises ConfigError if it has none."""
    if options.clients is not None:
        raise ConfigError("clients send when they are answered, at no rate; leave out rate or clients")
    if options.time_scale != 1:
        raise ConfigError("give rate or time_scale, not both")
    arrivals = options.arrivals
    if isinstance(arrivals, AtOnce):
        raise ConfigError("requests that come at once have no rate; leave out rate or arrivals")
    if isinstance(arrivals, Replay) or (arrivals is None and _has_arrival_times(options)):
        return replace(options, arrivals=Replay(rate=rate))
    return replace(options, arrivals=Poisson(rate) if arrivals is None else replace(arrivals, rate=rate))  # type: ignore[type-var]


def _has_arrival_times(options: WorkloadOptions) -> bool:
    """Whether the workload's trace has arrival times."""
    if options.trace is None:
        return False
    chosen = options.format or guess_format(options.trace)
    return chosen is not None and FORMATS[chosen].timed


@dataclass(frozen=True, slots=True)
class ScenarioServiceSection(Section):
    """Reads a service; with only a model it may be the model's name alone."""

    folder: Path = Path()
    """Base of relative paths."""

    def read(self, node: Node, path: str) -> ScenarioService:
        """The service; its name defaults to the model's."""
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
            file = resolve_path(written.text, written.where, self.folder)
            fields["model_name"] = str(file.resolve()) if file.exists() else written.text
        service = ScenarioService(**fields)
        # Without an execution time, one is computed from the workload.
        if found := slo_problem(service.slo, service.execution_s or 1.0):
            goal, wrong = found
            raise problem(place_of(node, "slo", goal), f"{path}.slo.{goal}", wrong)
        return service


@dataclass(frozen=True, slots=True)
class ScenarioSection(Section):
    """Reads the top level of the file."""

    def read(self, node: Node, path: str) -> Scenario:
        _require_device(node)
        fields = self.read_fields(node, path)
        if "scheduler" in fields:
            fields["scheduler"], fields["preset"] = fields["scheduler"]
        try:
            fields = with_preset(fields, PRESETS[fields.get("preset", "shoal")])
            check_batches(fields.get("scheduler"), fields["batching"], "batching")
        except ConfigError as error:
            raise problem(node.where, "batching", str(error)) from error
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
    """Raise ConfigError with the line of an incident of an unknown engine."""
    engines = fields.get("engines", 1)
    for key, what in INCIDENTS.items():
        for index, incident in enumerate(fields.get(key, ())):
            if incident.engine >= engines:
                where = place_of(node, key, index, "engine")
                raise problem(
                    where, f"{key}[{index}].engine", unknown_engine_message(incident, what, engines)
                )


def _require_device(node: Node) -> None:
    """Raise ConfigError for the flag --model without a device."""
    latency = node.entries.get("latency") if isinstance(node, Table) else None
    roofline = latency.entries.get("roofline") if isinstance(latency, Table) else None
    if isinstance(roofline, Table) and roofline.where == "--model" and "device" not in roofline.entries:
        raise ConfigError(
            "--model needs a device whose data sheet gives its step times: write --device, such as a100-80"
        )


def _names(services: Sequence[ScenarioService], node: Node) -> list[str]:
    """The services' names; raises ConfigError without services, or for duplicate names."""
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
    """All keys of a scenario; folder: base of relative paths."""
    latency = latency_kind(folder)
    rules: dict[tuple[type, str], Any] = {
        **goal_kinds(),
        (ScenarioService, "model"): Maybe(ModelShape(folder)),
        (ScenarioService, "latency"): Maybe(latency),
        (ScenarioService, "context_tokens"): Maybe(integer(1)),
        (ScenarioService, "execution_s"): Maybe(seconds(above=0)),
        (ScenarioService, "quota"): integer(1),
        (ScenarioService, "starvation_s"): Maybe(OrWord(seconds(above=0), LONGEST_S)),
        (ScenarioPool, "tokens"): Maybe(integer(1)),
        (ScenarioPool, "blocks"): Maybe(integer(1)),
        (ScenarioPool, "utilisation"): number(above=0, maximum=1),
        (ScenarioPool, "block_size"): integer(1, 4096),
        (ScenarioPool, "swap_bytes_per_s"): number(above=0),
        (Scenario, "latency"): Maybe(latency),
        (Scenario, "engines"): integer(1, LARGEST_ENGINES),
        (Scenario, "dispatch"): Choice(DISPATCH_NAMES),
        (Scenario, "batching"): batching_section(offline=True),
        (Scenario, "fleet"): fleet_section(),
        (Scenario, "link"): Maybe(engine_link_section()),
        (Incident, "engine"): integer(0),
        (Scenario, "scheduler"): scheduler_section(offline=True),
        (Scenario, "weights"): weights_section(
            ScenarioWeights, {(ScenarioWeights, "slowdown"): number(minimum=1)}
        ),
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
    """Raise ConfigError for an unknown model, before errors about missing keys."""
    node: Node | None = table
    for key in ("latency", "roofline", "model"):
        node = node.entries.get(key) if isinstance(node, Table) else None
    if node is not None:
        Maybe(ModelShape(folder)).read(node, "latency.roofline.model")


def load_scenario(*, file: Path | None = None, flags: Table | None = None) -> Scenario:
    """The scenario in ``file``, overridden by ``flags``; raises ConfigError for the first mistake.

    Relative paths in the file start at its folder. A flag also removes keys of the file that it excludes: a
    trace removes lengths and arrivals, a rate removes clients, a size of the pool removes other sizes.
    """
    table = read_yaml(file) if file else Table({}, "", {})
    if flags is not None:
        table = apply_flags(table, flags)
    folder = file.parent if file else Path()
    _check_model(table, folder)
    if "workload" not in table.entries:
        raise problem("" if file is None else str(file), "", _NO_WORKLOAD)
    section = scenario_section(folder)
    try:
        scenario: Scenario = section.read(table, "")
    except UnknownKey as error:
        raise ConfigError(f"{error}{hint_other_section(error.key, section)}") from None
    return replace(scenario, title=file.stem) if file else scenario


def load_workload(*, file: Path | None = None, flags: Table | None = None) -> WorkloadOptions:
    """The workload of the scenario in ``file``, overridden by ``flags``, as ``load_scenario`` has it.

    Without lengths or a trace, 100 requests of ShareGPT's lengths; without times, one a second.
    """
    table = read_yaml(file) if file else Table({}, "", {})
    if flags is not None:
        table = apply_flags(table, flags)
    written = table.entries.get("workload")
    entries = dict(written.entries) if isinstance(written, Table) else {}
    if not entries.keys() & {"trace", "lengths"}:
        entries["lengths"] = Scalar("sharegpt", "the default workload")
        entries.setdefault("requests", Scalar("100", "the default workload"))
    if not entries.keys() & {"trace", "arrivals", "rate", "clients"}:
        entries["rate"] = Scalar("1", "the default workload")
    places = written.key_places if isinstance(written, Table) else {}
    section = _workload_section(file.parent if file else Path())
    options: WorkloadOptions = section.read(Table(entries, table.where, places), "workload")
    return options
