"""``Config``: all settings of a server, and ``load_config``, which reads them from a YAML file and flags."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.placing.options import PlacementOptions
from shoal.config.api_keys import KeyFile, Secret, SecretFile, api_key_section
from shoal.config.batch_presets import BATCH_PRESETS
from shoal.config.batching import batching_section, with_preset
from shoal.config.devices import (
    EngineDevice,
    Placement,
    PlacementKind,
    check_placement,
    check_simulated,
    device_section,
    named_devices,
)
from shoal.config.engine_latency import EngineLatencyKind
from shoal.config.flags import overlay
from shoal.config.fleet import fleet_section
from shoal.config.foreign_files import reject_foreign_yaml, reject_modelfile
from shoal.config.policies import Policy
from shoal.config.presets import PRESETS, Preset
from shoal.config.sections import Key, Rules, Section, UnknownKey, section_of
from shoal.config.services import check_services, service_section
from shoal.config.setting_tree import Node, Table, parse_yaml, place_of, problem, read_text
from shoal.config.value_kinds import (
    Choice,
    Maybe,
    OrWord,
    Several,
    as_table,
    byte_rate,
    integer,
    number,
    seconds,
    size,
)
from shoal.core import ConfigError, Service
from shoal.core.units import LONGEST_S
from shoal.engine.build import default_threads
from shoal.engine.options import EngineOptions
from shoal.forecast import PREDICTORS
from shoal.forecast.latency_sources import EngineLatency
from shoal.kvcache import KV_DTYPES, KVCacheOptions
from shoal.schedule import ADMISSIONS, ORDERS, PREEMPT_FOR_WAITING, VICTIMS, SchedulerOptions
from shoal.schedule.policies.residency import RESIDENCY_POLICIES
from shoal.schedule.weights_options import WeightsOptions

S = TypeVar("S")

# Policies that need known output lengths, which only workloads have.
_OFFLINE_ONLY = ("oracle",)
_DEFAULT_PRESET = "shoal"
_RENAMED = {"eviction": "preemption_mode", "preempt": "preempt_for_waiting"}
_MAX_QUEUE: Any = EngineOptions.__dataclass_fields__["max_queue"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Generic[S]):
    """All settings of a file and flags."""

    services: tuple[Service, ...]
    server: S
    """The HTTP server's own option dataclass."""
    devices: tuple[EngineDevice, ...] = (EngineDevice(device="cpu", name="0"),)
    placement: Placement = field(default_factory=dict)
    """Engines of each service."""
    latency: EngineLatency | None = None
    """Step times of simulated engines without their own."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    kv_cache: KVCacheOptions = field(default_factory=KVCacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    weights: WeightsOptions = field(default_factory=WeightsOptions)
    threads: int | None = None
    """CPU threads of each engine; None: see ``engine_plans``."""
    attention: str = "auto"
    max_queue: int = _MAX_QUEUE
    """Maximum waiting requests, beyond which new ones are rejected; its key is ``server.max_queue``."""

    def engine_plans(self) -> tuple[EnginePlan, ...]:
        """The plan of each engine.

        By default a single engine uses every core. Of several engines, each on the CPU uses an equal part of
        all cores but one, which is left for the API process. With Ray there is no default of this machine.
        """
        return tuple(
            EnginePlan(name=device.name, options=self._options_on(device)) for device in self.devices
        )

    def engine_options(self) -> EngineOptions:
        """The options of the only engine; raises ConfigError if there are several."""
        if self.scheduler.admission.by_batch:
            raise ConfigError(
                "batches are formed by `shoal serve` and `shoal simulate`; for this command choose another "
                "preset or admission"
            )
        if len(self.devices) != 1:
            names = ", ".join(device.device for device in self.devices)
            raise ConfigError(
                f"devices: write exactly one device for this command, got {len(self.devices)} ({names}); "
                "only `shoal serve` runs several engines"
            )
        if self.devices[0].simulated:
            raise ConfigError(
                "devices: this command needs a model that computes; only `shoal serve` runs simulated engines"
            )
        return self.engine_plans()[0].options

    def _options_on(self, device: EngineDevice) -> EngineOptions:
        everywhere = (device.name,)
        kv_bytes = device.kv_memory_bytes or self.kv_cache.memory_bytes
        weight_bytes = device.weights_memory_bytes or self.weights.memory_bytes
        sharing = sum(other.device == device.device for other in self.devices) if self._is_local else 1
        return EngineOptions(
            services=tuple(s for s in self.services if device.name in self.placement.get(s.name, everywhere)),
            device=device.device,
            latency=device.latency or (self.latency if device.simulated else None),
            kv_cache=replace(self.kv_cache, memory_bytes=kv_bytes),
            scheduler=self.scheduler,
            weights=replace(self.weights, memory_bytes=weight_bytes),
            threads=device.threads or self.threads or self._default_threads(device),
            attention=self.attention,
            max_queue=self.max_queue,
            memory_share=1 / sharing,
        )

    @property
    def _is_local(self) -> bool:
        """Whether the engines run on this machine."""
        return self.cluster.backend == "local"

    def _default_threads(self, device: EngineDevice) -> int | None:
        if len(self.devices) == 1 or device.device != "cpu" or not self._is_local:
            return None
        return max(1, (default_threads() - 1) // len(self.devices))


@dataclass(frozen=True, slots=True)
class ServerSection(Section):
    """Reads the server's options, and ``max_queue``, which is an option of engines."""

    def read(self, node: Node, path: str) -> tuple[Any, dict[str, Any]]:
        """The server's option dataclass, and fields of ``Config``."""
        fields = self.read_fields(node, path)
        rest = {"max_queue": fields.pop("max_queue")} if "max_queue" in fields else {}
        return self.build(fields, node, path), rest


@dataclass(frozen=True, slots=True)
class ClusterSection(Section):
    """Reads the written fields of the cluster, to which the scheduler's preset adds."""

    def read(self, node: Node, path: str) -> dict[str, Any]:
        """The written values, by field name."""
        return self.read_fields(node, path)


@dataclass(frozen=True, slots=True)
class SchedulerSection(Section):
    """Reads the scheduler's options, which override those of its preset."""

    def read(self, node: Node, path: str) -> tuple[SchedulerOptions, str]:
        """The options, and the name of the preset."""
        fields = self.read_fields(node, path)
        preset = fields.pop("preset", _DEFAULT_PRESET)
        try:
            return replace(PRESETS[preset].scheduler, **fields), preset
        except ConfigError as error:
            raise problem(node.where, path, str(error)) from error


@dataclass(frozen=True, slots=True)
class ConfigSection(Section):
    """Reads the top level of the file."""

    def read(self, node: Node, path: str) -> "Config[Any]":
        fields = self.read_fields(node, path)
        fields["server"], rest = fields["server"]
        preset = _DEFAULT_PRESET
        if "scheduler" in fields:
            fields["scheduler"], preset = fields["scheduler"]
            fields["kv_cache"] = _with_layout(fields.get("kv_cache"), node, PRESETS[preset].layout)
        fields["cluster"] = _cluster(fields.get("cluster", {}), node, PRESETS[preset])
        check_batches(fields.get("scheduler"), fields["cluster"].batching)
        return Config(**fields, **rest)


def _cluster(written: dict[str, Any], node: Node, preset: Preset) -> ClusterOptions:
    """The cluster's options, with the preset's batching and dispatch where none are written."""
    try:
        return ClusterOptions(**with_preset(written, preset))
    except ConfigError as error:
        raise problem(place_of(node, "cluster"), "cluster", str(error)) from error


def check_batches(
    scheduler: SchedulerOptions | None, batching: BatchingOptions | None, key: str = "cluster.batching"
) -> None:
    """Raise ConfigError for an engine that waits for batches which nobody forms.

    key: where it is written how they are formed.
    """
    if scheduler is not None and scheduler.admission.by_batch and batching is None:
        raise ConfigError(
            f"the admission `batch` runs batches that the cluster forms: write {key}, such as `batching: "
            "{former: fixed, max_batch: 16}`, or another admission, or choose a preset that forms batches: "
            + ", ".join(BATCH_PRESETS)
        )


def _with_layout(options: KVCacheOptions | None, node: Node, layout: str) -> KVCacheOptions:
    """The pool's options, with the preset's layout if none is written."""
    options = KVCacheOptions() if options is None else options
    written = as_table(node, "").entries.get("kv_cache")
    if isinstance(written, Table) and "layout" in written.entries:
        return options
    return replace(options, layout=layout)


def scheduler_section(*, offline: bool = False) -> SchedulerSection:
    """The scheduler's keys; offline: including policies that need known output lengths."""
    left_out = () if offline else _OFFLINE_ONLY
    rules: dict[tuple[type, str], Any] = {
        (SchedulerOptions, "order"): Policy({name: section_of(cls, {}) for name, cls in ORDERS.items()}),
        (SchedulerOptions, "lengths"): Choice(tuple(name for name in PREDICTORS if name not in left_out)),
        (SchedulerOptions, "victim"): Choice(tuple(VICTIMS)),
        (SchedulerOptions, "admission"): Policy(
            {name: section_of(cls, {}) for name, cls in ADMISSIONS.items() if name not in left_out}
        ),
        (SchedulerOptions, "starvation_s"): OrWord(seconds(), LONGEST_S),
        (SchedulerOptions, "preempt_for_waiting"): Choice(PREEMPT_FOR_WAITING),
        (SchedulerOptions, "max_token_gap_s"): OrWord(seconds(), LONGEST_S),
        (SchedulerOptions, "max_running"): Maybe(integer(1)),
        (SchedulerOptions, "max_batched_tokens"): integer(1),
        (SchedulerOptions, "depth"): Maybe(integer(1, 2)),
        (SchedulerOptions, "max_iterations"): integer(1),
        (SchedulerOptions, "co_batch_rows"): Maybe(integer(1)),
    }
    preset = Key("preset", "preset", Choice(tuple(PRESETS)), _DEFAULT_PRESET)
    keys = (preset, *section_of(SchedulerOptions, rules).keys)
    return SchedulerSection(SchedulerOptions, keys, renamed=_RENAMED)


def weights_section(cls: type[WeightsOptions] = WeightsOptions, rules: Rules | None = None) -> Section:
    """The keys of the memory for weights; rules: for further fields of ``cls``."""
    policy = Policy({name: section_of(each, {}) for name, each in RESIDENCY_POLICIES.items()})
    own: Rules = {
        (cls, "memory_bytes"): Maybe(size()),
        (cls, "policy"): policy,
        (cls, "quantum_s"): seconds(above=0),
        (cls, "max_absence_s"): seconds(above=0),
        (cls, "bandwidth"): Maybe(byte_rate()),
    }
    return section_of(cls, {**own, **(rules or {})})


def config_section(server: type[S], folder: Path = Path()) -> Section:
    """All keys of the configuration.

    server: the HTTP server's option dataclass. folder: base of relative paths.
    """
    rules: dict[tuple[type, str], Any] = {
        (KVCacheOptions, "block_size"): integer(1, 4096),
        (KVCacheOptions, "dtype"): Choice(KV_DTYPES),
        (KVCacheOptions, "layout"): Choice(("merged", "split")),
        (server, "port"): integer(0, 65_535),
        (server, "api_keys"): Several(api_key_section()),
        (server, "api_key_file"): Maybe(KeyFile(folder)),
        (server, "admin_key"): Maybe(Secret()),
        (server, "admin_key_file"): Maybe(SecretFile(folder)),
        (Config, "threads"): Maybe(integer(1)),
        (Config, "devices"): Several(device_section(folder)),
        (Config, "latency"): Maybe(EngineLatencyKind(folder)),
        (Config, "placement"): PlacementKind(),
        (ClusterOptions, "dispatch"): Choice(DISPATCH_NAMES),
        (ClusterOptions, "batching"): batching_section(),
        (ClusterOptions, "fleet"): fleet_section(),
        (PlacementOptions, "beta"): number(above=0, maximum=1),
    }
    rules[Config, "cluster"] = ClusterSection(ClusterOptions, section_of(ClusterOptions, rules).keys)
    rules[Config, "services"] = Several(service_section(folder))
    rules[Config, "scheduler"] = scheduler_section()
    rules[Config, "weights"] = weights_section()
    plain = section_of(server, rules)
    queue = Key("max_queue", "max_queue", integer(1), _MAX_QUEUE)
    rules[Config, "server"] = ServerSection(server, (*plain.keys, queue))
    keys = section_of(Config, rules).keys
    return ConfigSection(Config, tuple(key for key in keys if key.field != "max_queue"))


def load_config(server: type[S], *, file: Path | None = None, flags: Table | None = None) -> Config[S]:
    """The configuration in ``file``, overridden by ``flags``; raises ConfigError for the first mistake.

    Relative paths start at the file's folder, or without a file at the working directory.
    """
    table = _read_file(file) if file else Table({}, "", {})
    section = config_section(server, file.parent if file else Path())
    if flags is not None:
        table = overlay(table, flags)
    empty = {name: Table({}, "", {}) for name in ("services", "server") if name not in table.entries}
    if "services" in empty:
        check_services(())
    table = Table({**table.entries, **empty}, table.where, table.key_places)
    try:
        config: Config[S] = section.read(table, "")
    except UnknownKey as error:
        raise ConfigError(f"{error}{hint_other_section(error.key, section)}") from None
    check_services(config.services)
    config = replace(config, devices=named_devices(config.devices, table))
    services, engines = [s.name for s in config.services], [d.name for d in config.devices]
    check_placement(config.placement, services, engines, table)
    check_simulated(config.devices, config.latency, services, table)
    return config


def _read_file(file: Path) -> Table:
    """The settings in a file; raises ConfigError, also for configurations of other programs."""
    text = read_text(file)
    reject_modelfile(text, file)
    table = parse_yaml(text, str(file))
    reject_foreign_yaml(table, file)
    return table


def hint_other_section(key: str, section: Section) -> str:
    """For an unknown key: a hint at a section that has it, or ""."""
    paths = [path for path, known in section.walk() if known.name == key]
    return f" (there is '{paths[0]}')" if paths else ""
