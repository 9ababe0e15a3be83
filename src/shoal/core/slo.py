"""SLOs: validation of latency goals, the effective goals of a request, SLO attainment."""

import math
from collections.abc import Iterable

from shoal.core.errors import InvalidRequest
from shoal.core.metrics import RequestRecord
from shoal.core.service import NO_GOALS, SLO

LONGEST_GOAL_S = 10 * 365 * 86_400.0
"""Limit on goals that are times."""
LARGEST_SCALE = 1e6

# By the name in configuration files and HTTP bodies: the field, its largest value, its unit.
_GOALS = {
    "ttft": ("ttft_s", LONGEST_GOAL_S, " seconds"),
    "tpot": ("tpot_s", LONGEST_GOAL_S, " seconds"),
    "mtpot": ("mtpot_s", LONGEST_GOAL_S, " seconds"),
    "e2e": ("e2e_s", LONGEST_GOAL_S, " seconds"),
    "e2e_scale": ("e2e_scale", LARGEST_SCALE, ""),
}
_NO_EXECUTION_TIME = (
    "is a multiple of the service's execution time, which is not known: measure it with `shoal profile` "
    "or write `execution: 1.2s` for the service, or give `e2e` as a time"
)


def slo_problem(slo: SLO, execution_s: float | None) -> tuple[str, str] | None:
    """(goal, problem) if a goal of ``slo`` is invalid, else None.

    The goal has its name in configuration files (``ttft``, not ``ttft_s``). execution_s: execution time of
    the service, which ``e2e_scale`` needs.
    """
    for goal, (field, largest, unit) in _GOALS.items():
        value = getattr(slo, field)
        # NaN compares false, so it is rejected too.
        if value is not None and not 0 < value <= largest:
            return goal, f"must be more than 0 and at most {largest:g}{unit}, got {value}"
    return ("e2e_scale", _NO_EXECUTION_TIME) if slo.e2e_scale is not None and execution_s is None else None


def resolve_slo(own: SLO, service: SLO, execution_s: float | None) -> SLO:
    """The goals of a request: its ``own``, else those of its ``service``.

    ``e2e_scale`` is converted to ``e2e_s``. An ``e2e_s`` or ``e2e_scale`` of its own replaces both of the
    service's; if an SLO has both, the shorter time counts. Raises InvalidRequest for ``e2e_scale`` without
    ``execution_s``.
    """
    if own is NO_GOALS and service is NO_GOALS:
        return NO_GOALS
    has_e2e = own.e2e_s is not None or own.e2e_scale is not None
    e2e_s, scale = (own.e2e_s, own.e2e_scale) if has_e2e else (service.e2e_s, service.e2e_scale)
    if scale is not None:
        if execution_s is None:
            raise InvalidRequest(f"slo.e2e_scale {_NO_EXECUTION_TIME}", param="slo.e2e_scale")
        e2e_s = min(scale * execution_s, math.inf if e2e_s is None else e2e_s)
    return SLO(
        ttft_s=service.ttft_s if own.ttft_s is None else own.ttft_s,
        tpot_s=service.tpot_s if own.tpot_s is None else own.tpot_s,
        mtpot_s=service.mtpot_s if own.mtpot_s is None else own.mtpot_s,
        e2e_s=e2e_s,
    )


def has_goal(slo: SLO) -> bool:
    return slo != NO_GOALS


def met(record: RequestRecord, slo: SLO) -> bool | None:
    """Whether a finished request met every goal of its resolved ``slo``; None if it has no goal.

    ``tpot_s`` and ``mtpot_s`` do not apply to an output of one token.
    """
    if not has_goal(slo):
        return None
    if slo.e2e_scale is not None:
        raise ValueError("e2e_scale is not resolved; call resolve_slo first")
    times = [(record.ttft_s, slo.ttft_s), (record.e2e_s, slo.e2e_s)]
    if record.output_tokens > 1:
        times += [(record.tpot_s, slo.tpot_s), (record.mtpot_s, slo.mtpot_s)]
    return all(goal is None or time <= goal for time, goal in times)


def attainment(outcomes: Iterable[bool | None]) -> float:
    """SLO attainment: the share of requests with goals that met them; NaN if none has goals.

    outcomes: result of ``met`` for each request; False for one that had goals and failed.
    """
    counted = [outcome for outcome in outcomes if outcome is not None]
    return sum(counted) / len(counted) if counted else math.nan
