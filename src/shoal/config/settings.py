"""The whole configuration: every key, and how a file and flags become option dataclasses."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoal.cluster.manager.dispatch import DISPATCH_NAMES
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.config.api_keys import KeyFile, Secret, SecretFile, api_key_section
from shoal.config.devices import (
    EngineDevice,
    Placement,
    PlacementKind,
    check_placement,
    device_section,
    named_devices,
)
from shoal.config.flags import overlay
from shoal.config.foreign_files import refuse_modelfile, refuse_other_yaml
from shoal.config.policies import Policy
from shoal.config.presets import PRESETS
from shoal.config.sections import Key, Section, UnknownKey, section_of
from shoal.config.services import check_services, service_section
from shoal.config.setting_tree import Node, Table, parse_yaml, problem, read_text
from shoal.config.value_kinds import Choice, Maybe, OrNever, Several, as_table, integer, seconds
from shoal.core import ConfigError, Service
from shoal.core.units import LONGEST_S
from shoal.engine.build import default_threads
from shoal.engine.options import EngineOptions
from shoal.forecast import PREDICTORS
from shoal.kvcache import KV_DTYPES, KVCacheOptions
from shoal.schedule import ADMISSIONS, ORDERS, PREEMPT_FOR_WAITING, VICTIMS, SchedulerOptions

S = TypeVar("S")

# What needs output lengths that are known beforehand, which only workloads have.
_OFFLINE = ("oracle",)
_DEFAULT_PRESET = "shoal"
_RENAMED = {"eviction": "preemption_mode", "preempt": "preempt_for_waiting"}
_MAX_QUEUE: Any = EngineOptions.__dataclass_fields__["max_queue"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Generic[S]):
    """Everything that a file and flags can say."""

    services: tuple[Service, ...]
    """What is served."""
    server: S
    """The HTTP server's own option dataclass."""
    devices: tuple[EngineDevice, ...] = (EngineDevice(device="cpu", name="0"),)
    """The device of each engine."""
    placement: Placement = field(default_factory=dict)
    """Which engines have a service."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    """How the engines are run, watched and chosen."""
    kv_cache: KVCacheOptions = field(default_factory=KVCacheOptions)
    """The KV pool of each engine."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """The scheduler of each engine."""
    threads: int | None = None
    """CPU threads of each engine; None: see ``engine_plans``."""
    attention: str = "auto"
    """Attention backend."""
    max_queue: int = _MAX_QUEUE
    """Waiting requests beyond which further ones are rejected; its key is ``server.max_queue``."""

    def engine_plans(self) -> tuple[EnginePlan, ...]:
        """What each engine is built from.

        Where no threads are written, one engine takes every core; of several each on the CPU takes its part
        of all cores but one, which is left to the API process. Over Ray this machine's cores mean nothing.
        """
        return tuple(
            EnginePlan(name=device.name, options=self._options_on(device)) for device in self.devices
        )

    def engine_options(self) -> EngineOptions:
        """What the only engine is built from; raises ConfigError if there are several."""
        if len(self.devices) != 1:
            names = ", ".join(device.device for device in self.devices)
            raise ConfigError(
                f"devices: write exactly one device for this command, got {len(self.devices)} ({names}); "
                "only `shoal serve` runs several engines"
            )
        return self.engine_plans()[0].options

    def _options_on(self, device: EngineDevice) -> EngineOptions:
        everywhere = (device.name,)
        kv_bytes = device.kv_memory_bytes or self.kv_cache.memory_bytes
        sharing = sum(other.device == device.device for other in self.devices) if self._here else 1
        return EngineOptions(
            services=tuple(s for s in self.services if device.name in self.placement.get(s.name, everywhere)),
            device=device.device,
            kv_cache=replace(self.kv_cache, memory_bytes=kv_bytes),
            scheduler=self.scheduler,
            threads=device.threads or self.threads or self._default_threads(device),
            attention=self.attention,
            max_queue=self.max_queue,
            memory_share=1 / sharing,
        )

    @property
    def _here(self) -> bool:
        """Whether the engines run on this machine."""
        return self.cluster.backend == "local"

    def _default_threads(self, device: EngineDevice) -> int | None:
        if len(self.devices) == 1 or device.device != "cpu" or not self._here:
            return None
        return max(1, (default_threads() - 1) // len(self.devices))


@dataclass(frozen=True, slots=True)
class ServerSection(Section):
    """The server's options and, beside them, the length of the engine's queue."""

    def read(self, node: Node, path: str) -> tuple[Any, dict[str, Any]]:
        """The server's option dataclass, and what belongs to the configuration itself."""
        fields = self.read_fields(node, path)
        rest = {"max_queue": fields.pop("max_queue")} if "max_queue" in fields else {}
        return self.build(fields, node, path), rest


@dataclass(frozen=True, slots=True)
class SchedulerSection(Section):
    """The scheduler's options, over those of the preset that is named beside them."""

    def read(self, node: Node, path: str) -> tuple[SchedulerOptions, str]:
        """The options, and the preset's name."""
        fields = self.read_fields(node, path)
        preset = fields.pop("preset", _DEFAULT_PRESET)
        try:
            return replace(PRESETS[preset].scheduler, **fields), preset
        except ConfigError as error:
            raise problem(node.where, path, str(error)) from error


@dataclass(frozen=True, slots=True)
class ConfigSection(Section):
    """The top of the file."""

    def read(self, node: Node, path: str) -> "Config[Any]":
        """The whole configuration."""
        fields = self.read_fields(node, path)
        fields["server"], rest = fields["server"]
        if "scheduler" in fields:
            fields["scheduler"], preset = fields["scheduler"]
            fields["kv_cache"] = _with_layout(fields.get("kv_cache"), node, PRESETS[preset].layout)
        return Config(**fields, **rest)


def _with_layout(options: KVCacheOptions | None, node: Node, layout: str) -> KVCacheOptions:
    """The pool's options, with the preset's layout where none was written."""
    options = KVCacheOptions() if options is None else options
    written = as_table(node, "").entries.get("kv_cache")
    if isinstance(written, Table) and "layout" in written.entries:
        return options
    return replace(options, layout=layout)


def scheduler_section(*, offline: bool = False) -> SchedulerSection:
    """The scheduler's keys; offline: also the policies that need output lengths known beforehand."""
    left_out = () if offline else _OFFLINE
    rules: dict[tuple[type, str], Any] = {
        (SchedulerOptions, "order"): Policy({name: section_of(cls, {}) for name, cls in ORDERS.items()}),
        (SchedulerOptions, "lengths"): Choice(tuple(name for name in PREDICTORS if name not in left_out)),
        (SchedulerOptions, "victim"): Choice(tuple(VICTIMS)),
        (SchedulerOptions, "admission"): Policy(
            {name: section_of(cls, {}) for name, cls in ADMISSIONS.items() if name not in left_out}
        ),
        (SchedulerOptions, "starvation_s"): OrNever(seconds(), LONGEST_S),
        (SchedulerOptions, "preempt_for_waiting"): Choice(PREEMPT_FOR_WAITING),
        (SchedulerOptions, "max_token_gap_s"): OrNever(seconds(), LONGEST_S),
        (SchedulerOptions, "max_running"): Maybe(integer(1)),
        (SchedulerOptions, "max_batched_tokens"): integer(1),
        (SchedulerOptions, "depth"): integer(1, 2),
        (SchedulerOptions, "max_iterations"): integer(1),
        (SchedulerOptions, "co_batch_rows"): Maybe(integer(1)),
    }
    preset = Key("preset", "preset", Choice(tuple(PRESETS)), _DEFAULT_PRESET)
    keys = (preset, *section_of(SchedulerOptions, rules).keys)
    return SchedulerSection(SchedulerOptions, keys, renamed=_RENAMED)


def config_section(server: type[S], folder: Path = Path()) -> Section:
    """Every key there is.

    server: the HTTP server's option dataclass. folder: where relative paths start.
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
        (Config, "devices"): Several(device_section()),
        (Config, "placement"): PlacementKind(),
        (ClusterOptions, "dispatch"): Choice(DISPATCH_NAMES),
    }
    rules[Config, "services"] = Several(service_section(folder))
    rules[Config, "scheduler"] = scheduler_section()
    plain = section_of(server, rules)
    queue = Key("max_queue", "max_queue", integer(1), _MAX_QUEUE)
    rules[Config, "server"] = ServerSection(server, (*plain.keys, queue))
    keys = section_of(Config, rules).keys
    return ConfigSection(Config, tuple(key for key in keys if key.field != "max_queue"))


def load_config(server: type[S], *, file: Path | None = None, flags: Table | None = None) -> Config[S]:
    """The configuration in ``file``, with ``flags`` over it; raises ConfigError for the first mistake.

    Relative paths of chat templates and files of keys start at the file's folder, or where the command runs.
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
        raise ConfigError(f"{error}{elsewhere(error.key, section)}") from None
    check_services(config.services)
    config = replace(config, devices=named_devices(config.devices, table))
    services, engines = [s.name for s in config.services], [d.name for d in config.devices]
    check_placement(config.placement, services, engines, table)
    return config


def _read_file(file: Path) -> Table:
    """The settings in a file; raises ConfigError, also for the configuration of another program."""
    text = read_text(file)
    refuse_modelfile(text, file)
    table = parse_yaml(text, str(file))
    refuse_other_yaml(table, file)
    return table


def elsewhere(key: str, section: Section) -> str:
    """Where the key ``key`` does exist, if it is not where it was written."""
    homes = [path for path, known in section.walk() if known.name == key]
    return f" (there is '{homes[0]}')" if homes else ""
