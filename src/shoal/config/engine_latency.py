"""Reads ``latency`` of servers: step times of simulated engines, as in scenarios or as a name alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.config.setting_tree import Node, Table, problem
from shoal.config.value_kinds import Text, as_table
from shoal.core import ConfigError
from shoal.forecast.device_specs import device_spec, find_device_spec
from shoal.forecast.latency_sources import (
    EngineLatency,
    FitLatency,
    Latency,
    ProfileLatency,
    RooflineLatency,
    RooflineOptions,
    in_words,
)

_SERVICES = "services"


@dataclass(frozen=True, slots=True)
class EngineLatencyKind:
    """Reads the step times of an engine; those of single services are in its key ``services``."""

    folder: Path | None
    """Base of relative paths that are not in flags; None: only names of devices are read, and no files."""
    label: str = "device's name, path, or mapping"

    def read(self, node: Node, path: str) -> EngineLatency:
        if not isinstance(node, Table) or _SERVICES not in node.entries:
            return EngineLatency(default=self._read_one(node, path))
        rest = {key: value for key, value in node.entries.items() if key != _SERVICES}
        default = self._read_one(Table(rest, node.where, node.key_places), path) if rest else None
        own = as_table(node.entries[_SERVICES], f"{path}.{_SERVICES}").entries
        services = {name: self._read_one(one, f"{path}.{_SERVICES}.{name}") for name, one in own.items()}
        return EngineLatency(default=default, services=services)

    def show(self, value: EngineLatency) -> str:
        """Where the step times come from, in words."""
        own = [f"{name}: {in_words(latency)}" for name, latency in value.services.items()]
        return "; ".join(([] if value.default is None else [in_words(value.default)]) + own)

    def _read_one(self, node: Node, path: str) -> Latency:
        # Imported here, as few servers need them: with scenarios come the modules of the simulator.
        from shoal.config.scenario_kinds import resolve_path
        from shoal.config.scenario_latency import latency_kind

        if isinstance(node, Table) and self.folder is not None:
            latency: Latency = latency_kind(self.folder.absolute()).read(node, path)
            return latency
        text: str = Text().read(node, path)
        file = None if self.folder is None else resolve_path(text, node.where, self.folder).absolute()
        if file is not None and os.path.exists(file) and (os.sep in text or find_device_spec(text) is None):
            return ProfileLatency(profile=file) if os.path.isdir(file) else FitLatency(fit=file)
        try:
            return RooflineLatency(roofline=RooflineOptions(device=device_spec(text)))
        except ConfigError as error:
            missing = "" if file is None else f"; and there is no file or folder {file}"
            raise problem(node.where, path, f"{error}{missing}") from None
