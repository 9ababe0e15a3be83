"""Submission of new and resumed requests; the resume state of a request that leaves for another engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core import (
    ANONYMOUS_TOKEN,
    FinishReason,
    InvalidRequest,
    Request,
    ResumeState,
    SyntheticPrompt,
    TokenEvent,
)
from shoal.core.errors import model_not_found
from shoal.core.length_limits import LengthLimits
from shoal.core.slo import resolve_slo
from shoal.kvcache import BlockPool
from shoal.schedule.request_state import RequestState, hash_prompt, new_request_state
from shoal.schedule.request_store import RequestStore
from shoal.schedule.service_limits import ServiceLimits, max_total_tokens


def resumable_request(state: RequestState, now_ns: int) -> Request:
    """The request of a removed state, with its output and resume state, to be submitted again."""
    synthetic = isinstance(state.request.prompt, SyntheticPrompt)
    resumed = ResumeState(
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
    left = state.request.slice_tokens
    if left is not None:
        left = max(1, left - (state.num_generated - state.request.num_output_tokens))
    return replace(state.request, output_tokens=output, resume_state=resumed, slice_tokens=left)


def restore(state: RequestState) -> None:
    """Restore a new state from the resume state of its request, as after a preemption.

    The time of its last step is unknown; the time of its newest token is used instead.
    """
    request, resumed = state.request, state.request.resume_state
    if state.num_generated:
        state.first_token_ns, state.last_token_ns = request.first_token_ns, request.last_token_ns
    if resumed is None:
        return
    state.last_scheduled_ns = state.last_token_ns if state.num_generated else request.arrival_ns
    state.largest_gap_ns = resumed.largest_gap_ns
    state.service_time_ns = resumed.service_time_ns
    state.num_cached_tokens = resumed.num_cached_tokens
    state.queue_ns = resumed.queue_ns
    state.num_admissions = resumed.num_admissions
    state.num_preemptions = resumed.num_preemptions
    state.num_preempted_by_starvation = resumed.num_preempted_by_starvation
    state.num_recomputed_tokens = resumed.num_recomputed_tokens
    state.num_scored_tokens = resumed.num_scored_tokens
    if state.num_generated and state.num_admissions:
        state.num_lost_tokens = state.num_tokens - 1


def check_complete(state: RequestState) -> tuple[FinishReason | None, int | None]:
    """(reason, stop token) if the output of a resumed request is already complete."""
    if not state.num_generated:
        return None, None
    last = state.token_ids[-1] if state.token_ids else ANONYMOUS_TOKEN
    return state.check_stop(last, state.num_generated)


class Submitter:
    """Queues new and resumed requests."""

    def __init__(self, pool: BlockPool, limits: Mapping[str, ServiceLimits], store: RequestStore) -> None:
        self._pool = pool
        self._limits = limits
        self._store = store
        self._num_submitted = 0

    def submit_all(self, requests: Sequence[Request], now_ns: int) -> list[TokenEvent]:
        """As ``Scheduler.submit_all``."""
        limits = [self._check(request) for request in requests]
        states: list[RequestState] = []
        choices: list[RequestState] = []
        hashes: list[bytes] = []
        for request, max_output_tokens in zip(requests, limits, strict=True):
            first = choices[0].request if choices else None
            if first is None or request.prompt is not first.prompt or request.service != first.service:
                choices = []
                if self._pool.prefix_caching:
                    hashes = hash_prompt(request.prompt, self._pool.block_size, request.cache_salt)
            states.append(self._make_state(request.on_clock(now_ns), max_output_tokens, hashes))
            self._store.add(states[-1], now_ns)
            choices.append(states[-1])
            if len(choices) > 1:
                choices[0].choices = choices[-1].choices = choices
        return [event for state in states if (event := self._end_if_complete(state, now_ns)) is not None]

    def new_state(self, request: Request, now_ns: int) -> RequestState:
        """The state of a request, without queueing it; raises InvalidRequest."""
        max_output_tokens = self._check(request)
        hashes: list[bytes] = []
        if self._pool.prefix_caching:
            hashes = hash_prompt(request.prompt, self._pool.block_size, request.cache_salt)
        return self._make_state(request.on_clock(now_ns), max_output_tokens, hashes)

    def _check(self, request: Request) -> int:
        """The number of output tokens for which there is room; raises as ``Scheduler.submit_all`` does."""
        if request.id in self._store.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use by an unfinished request", param="id")
        service, output = request.service, request.output_tokens
        limits = self._limits.get(service)
        if limits is None:
            raise model_not_found(service, self._limits)
        if isinstance(request.prompt, SyntheticPrompt) != isinstance(output, int) and output != ():
            raise InvalidRequest(
                "output_tokens must be token ids where the prompt is, and a number where the prompt is"
                " synthetic",
                param="output_tokens",
            )
        max_tokens = max_total_tokens(self._pool, service, limits)
        lengths = LengthLimits(service, limits.context_tokens, max_tokens)
        return lengths.check(
            len(request.prompt), request.sampling, request.num_output_tokens, request.resume_state
        )

    def _make_state(self, request: Request, max_output_tokens: int, hashes: Sequence[bytes]) -> RequestState:
        eos = self._limits[request.service].eos_token_ids
        state = new_request_state(request, self._num_submitted, max_output_tokens, eos, hashes)
        state.account = self._store.account_of(request)
        restore(state)
        service = self._store.services[request.service]
        state.slo = resolve_slo(request.slo, service.slo, service.execution_s)
        predictor = service.statistics.predictor
        generated, limit = state.num_generated, state.max_new_tokens
        if generated < limit:
            state.predicted_tokens = predictor.predict(request, 0, limit)
            if generated >= state.predicted_tokens:
                state.predicted_tokens = predictor.predict(request, generated, limit)
        self._num_submitted += 1
        return state

    def _end_if_complete(self, state: RequestState, now_ns: int) -> TokenEvent | None:
        reason, stop_token = check_complete(state)
        if reason is None:
            return None
        return self._store.end(state, reason, now_ns, stop_token=stop_token)
