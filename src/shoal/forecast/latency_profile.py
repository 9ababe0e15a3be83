"""Latency profiles: fitted step-time models of services on one device, read from and written to JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from shoal.core import ConfigError
from shoal.forecast.latency import LatencyModel
from shoal.forecast.latency_curve import CurveTimes, PiecewiseCost
from shoal.forecast.latency_padded import Bilinear, PaddedLatency
from shoal.forecast.step_times import FittedTimes, StepTimes

FORMAT = "shoal-latency"
VERSION = 1

Key = tuple[str, int]
"""Service, tensor-parallel degree."""

Costs = TypeVar("Costs", LatencyModel, Bilinear)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """Latency models by (service, tensor-parallel degree), valid on one kind of device."""

    device: str
    """As configured, such as ``cpu`` or ``cuda:0``."""
    threads: int
    """CPU threads of the measured engine."""
    models: Mapping[Key, LatencyModel]
    """Linear models."""
    padded: Mapping[Key, PaddedLatency] = field(default_factory=dict)
    """SCLS's formulas; may lack keys of ``models``."""
    curves: Mapping[Key, CurveTimes] = field(default_factory=dict)
    """Piecewise linear models; may lack keys of ``models``."""

    def model(self, service: str, degree: int = 1) -> LatencyModel:
        """The linear model of ``service``; raises a ConfigError that names the known services."""
        return _find(self.models, service, degree)

    def times(self, service: str, degree: int = 1) -> StepTimes:
        """The curve of ``service``, or else its linear model; raises ConfigError as ``model``."""
        curve = self.curves.get((service, degree))
        return curve if curve is not None else FittedTimes(self.model(service, degree))

    def padded_form(self, service: str, degree: int = 1) -> PaddedLatency:
        """SCLS's formulas for ``service``; raises ConfigError as ``model``."""
        return _find(self.padded, service, degree)

    def to_json(self) -> dict[str, Any]:
        services = []
        for (name, degree), model in self.models.items():
            entry = {"name": name, "tensor_parallel": degree, "step": asdict(model)}
            if (name, degree) in self.padded:
                entry["padded"] = asdict(self.padded[name, degree])
            if (name, degree) in self.curves:
                entry["curve"] = asdict(self.curves[name, degree])
            services.append(entry)
        return {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "threads": self.threads,
            "services": services,
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> "LatencyProfile":
        """From plain values; raises a ConfigError that begins with ``where`` and names the key."""
        top = _mapping(value, where)
        if top.get("format") != FORMAT:
            raise ConfigError(
                f"{where}: format: not a latency profile; `shoal profile MODEL --out {where}` writes one"
            )
        if top.get("version") != VERSION:
            raise ConfigError(
                f"{where}: version: expected {VERSION}, got {top.get('version')!r}; measure again with "
                f"`shoal profile MODEL --out {where}`"
            )
        device = top.get("device")
        if not isinstance(device, str):
            raise ConfigError(f"{where}: device: expected a device such as cpu or cuda:0, got {device!r}")
        entries = top.get("services")
        if not isinstance(entries, list):
            raise ConfigError(f"{where}: services: expected a list, got {entries!r}")
        models: dict[Key, LatencyModel] = {}
        padded: dict[Key, PaddedLatency] = {}
        curves: dict[Key, CurveTimes] = {}
        for index, entry in enumerate(entries):
            at = f"{where}: services[{index}]"
            read = _mapping(entry, at)
            key = _key(read, at)
            if key in models:
                raise ConfigError(f"{at}: {key[0]} with tensor_parallel {key[1]} is there already")
            models[key] = _costs(LatencyModel, read.get("step"), f"{at}.step")
            if "padded" in read:
                padded[key] = _padded(read["padded"], f"{at}.padded")
            if "curve" in read:
                curves[key] = _curve(read["curve"], f"{at}.curve")
        return cls(
            device=device,
            threads=_count(top.get("threads"), f"{where}: threads"),
            models=models,
            padded=padded,
            curves=curves,
        )


def save_profile(profile: LatencyProfile, path: Path) -> None:
    """Write JSON; raises ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the latency profile {path}: {error.strerror}") from error


def load_profile(path: Path) -> LatencyProfile:
    """Read a file of ``save_profile``; raises ConfigError with the file and the key."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the latency profile {path}: {error.strerror}; "
            f"`shoal profile MODEL --out {path}` writes one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return LatencyProfile.from_json(value, str(path))


Form = TypeVar("Form", LatencyModel, PaddedLatency)


def _find(forms: Mapping[Key, Form], service: str, degree: int) -> Form:
    form = forms.get((service, degree))
    if form is None:
        known = ", ".join(f"{name} (tensor parallel {n})" for name, n in forms) or "none"
        raise ConfigError(
            f"no latency profile of {service} with tensor parallel {degree}; there is: {known}; "
            f"`shoal profile {service}` measures it"
        )
    return form


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object with keys, got {value!r:.40}")
    return value


def _key(entry: dict[str, Any], where: str) -> Key:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}.name: expected a service's name, got {name!r}")
    return name, _count(entry.get("tensor_parallel", 1), f"{where}.tensor_parallel")


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: expected a number of at least 1, got {value!r}")
    return value


def _padded(value: Any, where: str) -> PaddedLatency:
    read = _mapping(value, where)
    return PaddedLatency(
        prefill=_costs(Bilinear, read.get("prefill"), f"{where}.prefill"),
        decode=_costs(Bilinear, read.get("decode"), f"{where}.decode"),
    )


def _curve(value: Any, where: str) -> CurveTimes:
    read = _mapping(value, where)
    names = [known.name for known in fields(CurveTimes)]
    _check_keys(read, names, where)
    values: dict[str, Any] = {
        name: (_piecewise_cost if name in ("tokens", "decodes") else _cost)(read.get(name), f"{where}.{name}")
        for name in names
    }
    return CurveTimes(**values)


def _piecewise_cost(value: Any, where: str) -> PiecewiseCost:
    read = _mapping(value, where)
    _check_keys(read, ("knots", "seconds"), where)
    for name in ("knots", "seconds"):
        if not isinstance(read.get(name), list):
            raise ConfigError(f"{where}.{name}: expected a list, got {read.get(name)!r}")
    knots = [_count(knot, f"{where}.knots[{i}]") for i, knot in enumerate(read["knots"])]
    seconds = [_cost(cost, f"{where}.seconds[{i}]") for i, cost in enumerate(read["seconds"])]
    try:
        return PiecewiseCost(tuple(knots), tuple(seconds))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _costs(cls: type[Costs], value: Any, where: str) -> Costs:
    """Read a dataclass of costs; all keys are required."""
    read = _mapping(value, where)
    names = [known.name for known in fields(cls)]
    _check_keys(read, names, where)
    return cls(**{name: _cost(read.get(name), f"{where}.{name}") for name in names})


def _cost(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(f"{where}: expected a number of at least 0, got {value!r}")
    return value


def _check_keys(read: dict[str, Any], names: Sequence[str], where: str) -> None:
    unknown = sorted(read.keys() - set(names))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: unknown key; possible here: {', '.join(names)}")
