"""What travels with a request that goes on elsewhere, or here once more: taken out, and taken in."""

from dataclasses import replace

from shoal.core import ANONYMOUS_TOKEN, Carried, FinishReason, Request, SyntheticPrompt
from shoal.schedule.request_state import RequestState


def to_resume(state: RequestState, now_ns: int) -> Request:
    """The request of a state that was removed, with its output and what was counted: to submit it again."""
    synthetic = isinstance(state.request.prompt, SyntheticPrompt)
    carried = Carried(
        max_new_tokens=state.max_new_tokens,
        age_ns=now_ns - state.arrival_ns,
        first_token_age_ns=now_ns - state.first_token_ns if state.num_generated else 0,
        last_token_age_ns=now_ns - state.last_token_ns if state.num_generated else 0,
        largest_gap_ns=state.largest_gap_ns,
        service_time_ns=state.service_time_ns,
        num_cached_tokens=state.num_cached_tokens,
        queue_ns=state.queue_ns,
        num_admissions=state.num_admissions,
        num_preemptions=state.num_preemptions,
        num_preempted_by_starvation=state.num_preempted_by_starvation,
        num_recomputed_tokens=state.num_recomputed_tokens,
        num_scored_tokens=state.num_scored_tokens,
    )
    output = state.num_generated if synthetic else tuple(state.token_ids[state.num_prompt_tokens :])
    return replace(state.request, output_tokens=output, carried=carried)


def resume(state: RequestState) -> None:
    """Let a new state go on from what its request carries, as after a preemption.

    Steps in which it took part are not known one by one, so it has been without one since its newest token.
    """
    request, carried = state.request, state.request.carried
    if state.num_generated:
        state.first_token_ns, state.last_token_ns = request.first_token_ns, request.last_token_ns
    if carried is None:
        return
    state.last_scheduled_ns = state.last_token_ns if state.num_generated else request.arrival_ns
    state.largest_gap_ns = carried.largest_gap_ns
    state.service_time_ns = carried.service_time_ns
    state.num_cached_tokens = carried.num_cached_tokens
    state.queue_ns = carried.queue_ns
    state.num_admissions = carried.num_admissions
    state.num_preemptions = carried.num_preemptions
    state.num_preempted_by_starvation = carried.num_preempted_by_starvation
    state.num_recomputed_tokens = carried.num_recomputed_tokens
    state.num_scored_tokens = carried.num_scored_tokens
    if state.num_generated and state.num_admissions:
        state.num_lost_tokens = state.num_tokens - 1


def known_end(state: RequestState) -> tuple[FinishReason | None, int | None]:
    """Why a new request ends at once, since its output is complete, and with which stop token."""
    if not state.num_generated:
        return None, None
    newest = state.token_ids[-1] if state.token_ids else ANONYMOUS_TOKEN
    return state.judge_end(newest, state.num_generated)
