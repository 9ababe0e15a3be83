"""Requests that wait although their latency goals are out of reach: since when, and who may be refused.

An engine with more work than it can do misses goals. First come, first served, it soon works for requests
that are late already, and all others become late behind them. ``SchedulerOptions.on_hopeless`` says what
becomes of such requests.
"""

from shoal.schedule.request_state import RequestState


def slo_expired_ns(request: RequestState) -> int | None:
    """From when on a waiting request misses one of its goals whatever happens; None: that never is.

    Goals are judged as ``core.slo.met`` judges them: its first token, or its end, comes then at the earliest;
    the mean time per token is that of as many tokens as it may have. It does not change while it waits.
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
    return min(times, default=None)


def _first_after(start_ns: int, time_s: float) -> int:
    """The first nanosecond that is more than ``time_s`` after ``start_ns``."""
    return start_ns + round(time_s * 1e9) + 1


def may_be_refused(request: RequestState) -> bool:
    """Whether nobody has got anything of the call yet: no token, and no choice of it is being computed.

    Of a call that is resumed an earlier engine may have answered other choices.
    """
    if request.num_generated or request.choice_answered or request.request.resume_state is not None:
        return False
    return not any(choice.seq_id >= 0 or choice.num_generated for choice in request.choices)


def why_refused(request: RequestState, now_ns: int) -> str:
    """Says to a person why a request is refused."""
    slo = request.slo
    goals = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    named = ", ".join(f"{name} {goal:g} s" for name, goal in goals.items() if goal is not None)
    waited_s = (now_ns - request.arrival_ns) / 1e9
    return (
        f"no token after {waited_s:.3g} s: the goals of the request ({named}) can no longer be met, and such"
        " requests are refused here (on_hopeless)"
    )
