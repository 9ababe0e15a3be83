"""Sources of step times as they are configured: a fitted profile, layer tables, or a device's data sheet."""

from dataclasses import dataclass
from pathlib import Path

from shoal.core import ConfigError
from shoal.forecast.data_parallel import RankTimes
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency_profile import load_profile
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.overhead import NO_OVERHEAD, HostOverhead, OverheadTimes
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
