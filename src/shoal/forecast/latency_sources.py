"""Sources of step times as they are configured: a fitted profile, layer tables, or a device's data sheet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core import ConfigError
from shoal.forecast.data_parallel import RankTimes
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency_profile import load_profile
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.overhead import NO_OVERHEAD, HostOverhead, OverheadTimes
from shoal.forecast.profile_files.reading import measured_device, measured_model, read_meta
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitLatency:
    """Step times fitted by ``shoal profile``."""

    fit: Path
    """The file of ``shoal profile``."""
    service: str | None = None
    """Service in the file; None: that of the same name, or the only one."""
    tp: int = 1
    """Tensor-parallel devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLatency:
    """Step times from tables of measured layer times."""

    profile: Path
    """Folder of the tables."""
    tp: int = 1
    """Tensor-parallel devices."""
    model: ModelSpec | None = None
    """Model whose layers are counted; None: the service's, or that of the folder's metadata."""
    device: DeviceSpec | None = None
    """None: that of the folder's metadata."""
    link: Link | None = None
    """Link between the devices; None: as measured, or that of the device."""
    overhead: HostOverhead = NO_OVERHEAD
    """Overhead of the host."""
    data_parallel: int = 1
    """Ranks with expert parallelism, each with its own device and KV pool, that step together."""
    expert_imbalance: float = 1.0
    """With ranks: tokens of the busiest rank's experts, relative to an even share."""

    def __post_init__(self) -> None:
        if self.data_parallel > 1 and self.tp > 1:
            raise ConfigError("ranks of several devices (data_parallel and tp above 1) cannot be simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """A model, and devices of one kind."""

    device: DeviceSpec
    """Data sheet of a device."""
    model: ModelSpec | None = None
    """None: the service's."""
    tp: int = 1
    """Tensor-parallel devices."""
    link: Link | None = None
    """Link between the devices; None: that of the data sheet."""
    overhead: HostOverhead = NO_OVERHEAD
    """Overhead of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatency:
    """Step times computed from data sheets."""

    roofline: RooflineOptions


Latency = FitLatency | ProfileLatency | RooflineLatency


def step_times(name: str, latency: Latency, model: ModelSpec | None) -> StepTimes:
    """Step times of service ``name``; raises ConfigError if ``latency`` is incomplete."""
    if isinstance(latency, FitLatency):
        return _fitted(name, latency)
    if isinstance(latency, ProfileLatency):
        return _with_overhead(_measured(latency, model), latency.overhead, model)
    if model is None:
        raise ConfigError(
            f"latency.roofline: nothing says which model service {name} runs; write the service's model, "
            "roofline: {model: llama-3.1-8b, ...}, or the flag --model"
        )
    sheet = latency.roofline
    try:
        times = RooflineTimes(model, sheet.device, sheet.tp, link=sheet.link)
    except ConfigError as error:
        raise ConfigError(f"latency.roofline.tp (`shoal simulate --tp`): {error}") from None
    return _with_overhead(times, sheet.overhead, model)


def _measured(latency: ProfileLatency, model: ModelSpec | None) -> StepTimes:
    device, link = latency.device, latency.link
    if latency.data_parallel == 1:
        return ProfileTimes.load(latency.profile, latency.tp, model=model, device=device, link=link)
    return RankTimes.load(
        latency.profile,
        latency.data_parallel,
        model=model,
        device=device,
        link=link,
        imbalance=latency.expert_imbalance,
    )


def _with_overhead(times: StepTimes, overhead: HostOverhead, model: ModelSpec | None) -> StepTimes:
    """Step times with the host's overhead, if there is one."""
    if model is None or overhead == NO_OVERHEAD:
        return times
    return OverheadTimes(times, overhead, model.layers)


def _fitted(name: str, latency: FitLatency) -> StepTimes:
    profile = load_profile(latency.fit)
    there = {service for service, _ in profile.models}
    chosen = latency.service or name
    if latency.service is None and name not in there and len(there) == 1:
        [chosen] = there
    try:
        return profile.times(chosen, latency.tp)
    except ConfigError as error:
        raise ConfigError(
            f"{latency.fit}: {error}; write latency.service to choose one of the file"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLatency:
    """Step times of all services of an engine."""

    default: Latency | None = None
    """Of services without their own; None: every service needs its own."""
    services: Mapping[str, Latency] = field(default_factory=dict)
    """By service."""

    def __post_init__(self) -> None:
        """Raises ConfigError for data-parallel ranks, which are several engines that step together."""
        for latency in filter(None, (self.default, *self.services.values())):
            if isinstance(latency, ProfileLatency) and latency.data_parallel > 1:
                raise ConfigError("latency.data_parallel: only `shoal simulate` simulates such ranks")

    def of(self, service: str) -> Latency:
        """The source for a service; raises ConfigError if there is none."""
        found = self.services.get(service, self.default)
        if found is None:
            raise ConfigError(
                f"latency: nothing says how long steps of service {service} take; write it in "
                f"latency.services as {{{service}: h100}}, or beside that for all other services"
            )
        return found


def timed_model(latency: Latency) -> ModelSpec | None:
    """The model that ``latency`` is of; None: that of its service, or not known."""
    if isinstance(latency, FitLatency):
        return None
    if isinstance(latency, RooflineLatency):
        return latency.roofline.model
    return latency.model or measured_model(read_meta(latency.profile))


def timed_device(latency: Latency) -> tuple[DeviceSpec | None, int]:
    """The kind of device that ``latency`` is of (None: not known), and how many of them share a model."""
    if isinstance(latency, FitLatency):
        return None, latency.tp
    if isinstance(latency, RooflineLatency):
        return latency.roofline.device, latency.roofline.tp
    return latency.device or measured_device(read_meta(latency.profile)), latency.tp


def in_words(latency: Latency) -> str:
    """Where the step times come from, for people."""
    if isinstance(latency, FitLatency):
        return f"fit {latency.fit}"
    if isinstance(latency, ProfileLatency):
        return f"layer times {latency.profile}"
    sheet = latency.roofline
    model = "" if sheet.model is None else f" for {sheet.model.name}"
    return f"data sheet of {'' if sheet.tp == 1 else f'{sheet.tp} x '}{sheet.device.name}{model}"
