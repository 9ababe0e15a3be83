"""Plain values that every other room uses: requests, sampling parameters, services, SLOs, step plans, errors.

Also here: counter-based randomness, metric formulas, the lookup of a policy by name, and the parsing of
sizes and times (``units``). Nothing here does I/O, reads a clock, holds a tensor or knows a policy.
Times inside the system are integer nanoseconds (``*_ns``), times for people are seconds (``*_s``).
"""

from shoal.core.errors import (
    ConfigError,
    EngineDied,
    InvalidRequest,
    ModelUnavailable,
    ModelUnsupported,
    QueueFull,
    ServiceUnavailable,
    ShoalError,
    SLOExpired,
)
from shoal.core.grammar import Grammar, GrammarKind
from shoal.core.lengths import LengthPredictor
from shoal.core.metrics import RequestRecord, normalised_latency, percentile
from shoal.core.randomness import derive_seed, uniform
from shoal.core.registry import lookup
from shoal.core.request import (
    Client,
    FinishReason,
    Prompt,
    Request,
    ResumeState,
    SyntheticPrompt,
    TokenEvent,
    TokenLogprobs,
)
from shoal.core.sampling import SamplingDefaults, SamplingParams, sampling_params
from shoal.core.service import NO_GOALS, SLO, Service, service_problem
from shoal.core.slo import attainment, has_goal, met, resolve_slo, slo_problem
from shoal.core.step import (
    ANONYMOUS_TOKEN,
    NO_TOKEN,
    Arrival,
    BlockCopy,
    Failure,
    Idle,
    NewSequence,
    PromptLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
)
from shoal.core.token_deadlines import TokenDeadlines

__all__ = [
    "ANONYMOUS_TOKEN",
    "NO_GOALS",
    "NO_TOKEN",
    "SLO",
    "Arrival",
    "BlockCopy",
    "Client",
    "ResumeState",
    "ConfigError",
    "EngineDied",
    "Failure",
    "FinishReason",
    "SLOExpired",
    "Grammar",
    "GrammarKind",
    "Idle",
    "InvalidRequest",
    "NewSequence",
    "LengthPredictor",
    "ModelUnavailable",
    "ModelUnsupported",
    "Prompt",
    "PromptLogprobs",
    "QueueFull",
    "Request",
    "RequestRecord",
    "SamplingDefaults",
    "SamplingParams",
    "Service",
    "ServiceUnavailable",
    "ShoalError",
    "StepPlan",
    "StepResult",
    "StepTimings",
    "SyntheticPrompt",
    "TokenDeadlines",
    "TokenEvent",
    "TokenLogprobs",
    "attainment",
    "derive_seed",
    "has_goal",
    "lookup",
    "met",
    "normalised_latency",
    "percentile",
    "resolve_slo",
    "sampling_params",
    "slo_problem",
    "uniform",
    "service_problem",
]
