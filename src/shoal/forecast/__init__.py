"""Predictions: output lengths, peak memory of a batch, step times (latency models), traffic statistics.

These are vectorised functions of numbers, without a clock, and without state except what is learned from
finished requests. Their use (admission, preemption, simulation) is in other packages.
"""

from shoal.forecast.curve_fit import fit_curve
from shoal.forecast.device_specs import DEVICE_SPECS, DeviceSpec, device_spec
from shoal.forecast.draws import derive_seeds, uniforms
from shoal.forecast.latency import LatencyModel, StepShape
from shoal.forecast.latency_curve import CurveTimes, PiecewiseCost
from shoal.forecast.latency_fit import FitReport, PaddedSample, fit_latency, fit_padded
from shoal.forecast.latency_padded import Bilinear, PaddedLatency
from shoal.forecast.latency_profile import LatencyProfile, load_profile, save_profile
from shoal.forecast.learned import Accuracy, LearnedLengths
from shoal.forecast.lengths import COLD_STARTS, LengthDistribution, LengthHistory
from shoal.forecast.model_spec import MODEL_SPECS, ModelSpec, model_spec
from shoal.forecast.monitor import ServiceMonitor, Spread, Traffic
from shoal.forecast.overhead import NO_OVERHEAD, HostOverhead, OverheadTimes
from shoal.forecast.peak import Demand, SharedBlocks, Timeline
from shoal.forecast.predictors import PREDICTORS, make_predictor
from shoal.forecast.profile_files.reading import measured_device, measured_model, read_meta
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes, kv_tokens
from shoal.forecast.running_blocks import blocks_in
from shoal.forecast.serving_times import serving_times, times_from_speed
from shoal.forecast.step_times import FittedTimes, ScaledTimes, StepRows, StepTimes

__all__ = [
    "COLD_STARTS",
    "DEVICE_SPECS",
    "MODEL_SPECS",
    "NO_OVERHEAD",
    "PREDICTORS",
    "Accuracy",
    "PiecewiseCost",
    "Bilinear",
    "CurveTimes",
    "Demand",
    "DeviceSpec",
    "FitReport",
    "FittedTimes",
    "HostOverhead",
    "LatencyModel",
    "LatencyProfile",
    "LearnedLengths",
    "LengthDistribution",
    "LengthHistory",
    "ModelSpec",
    "OverheadTimes",
    "PaddedLatency",
    "PaddedSample",
    "ProfileTimes",
    "RooflineTimes",
    "ScaledTimes",
    "ServiceMonitor",
    "SharedBlocks",
    "Spread",
    "StepRows",
    "StepShape",
    "StepTimes",
    "Timeline",
    "Traffic",
    "blocks_in",
    "derive_seeds",
    "device_spec",
    "fit_curve",
    "fit_latency",
    "fit_padded",
    "kv_tokens",
    "load_profile",
    "make_predictor",
    "measured_device",
    "measured_model",
    "model_spec",
    "read_meta",
    "save_profile",
    "serving_times",
    "times_from_speed",
    "uniforms",
]
