"""Expired SLOs: when a waiting request can no longer meet its goals; it is served, put last or refused.

Under overload, first come, first served soon spends all time on requests that are late already, and the
requests behind them become late, too. ``SchedulerOptions.on_hopeless`` says how expired requests are treated.
"""

from shoal.schedule.request_state import RequestState


def slo_expired_ns(request: RequestState) -> int | None:
    """Time from which on a waiting request can no longer meet all of its goals; None: it always can.

    Goals are those of ``core.slo.met``, assuming that the first token, or the end, comes at once; the mean
    time per token assumes an output of the maximum length. The result does not change while the request
    waits.
    """
    slo, times = request.slo, []
    begun = request.num_generated > 0
    if slo.ttft_s is not None:
        late_ns = _first_after(request.arrival_ns, slo.ttft_s)
        if not begun or request.first_token_ns >= late_ns:
            times.append(late_ns)
    if slo.e2e_s is not None:
        times.append(_first_after(request.arrival_ns, slo.e2e_s))
    if slo.tpot_s is not None and begun:
        times.append(_first_after(request.first_token_ns, slo.tpot_s * (request.max_new_tokens - 1)))
    if slo.mtpot_s is not None and begun:
        kept = request.largest_gap_ns / 1e9 <= slo.mtpot_s
        times.append(_first_after(request.last_token_ns, slo.mtpot_s if kept else 0.0))
    return min(times, default=None)


def _first_after(start_ns: int, time_s: float) -> int:
    """The first nanosecond that is more than ``time_s`` after ``start_ns``."""
    return start_ns + round(time_s * 1e9) + 1


def may_be_refused(request: RequestState) -> bool:
    """Whether its call has no output yet, and no choice of it is running.

    For a resumed request an earlier engine may have answered other choices.
    """
    if request.num_generated or request.choice_has_output or request.request.resume_state is not None:
        return False
    return not any(choice.seq_id >= 0 or choice.num_generated for choice in request.choices)


def refusal_message(request: RequestState, now_ns: int) -> str:
    """Error message for the client."""
    slo = request.slo
    goals = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "mtpot": slo.mtpot_s, "e2e": slo.e2e_s}
    named = ", ".join(f"{name} {goal:g} s" for name, goal in goals.items() if goal is not None)
    waited_s = (now_ns - request.arrival_ns) / 1e9
    return (
        f"no token after {waited_s:.3g} s: the goals of the request ({named}) can no longer be met, and such"
        " requests are refused here (on_hopeless)"
    )
