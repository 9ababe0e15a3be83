"""From a step's result to events: tokens arrive, blocks become final, requests end."""

from collections.abc import Sequence
from typing import TypeVar

from shoal.core import (
    ANONYMOUS_TOKEN,
    NO_TOKEN,
    FinishReason,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from shoal.kvcache import BlockPool
from shoal.schedule.commit import Flight
from shoal.schedule.ledger import Ledger
from shoal.schedule.tracked import Tracked

T = TypeVar("T")

_NOT_FINITE = "the model's logits were not finite; in float16 a model may overflow, try bfloat16 or float32"


def account(
    flight: Flight, result: StepResult, ledger: Ledger, pool: BlockPool, now_ns: int
) -> list[TokenEvent]:
    """Enter what a plan produced; returns one event for each request that it changed.

    Tokens are all anonymous or none is; of anonymous ones, which say nothing, only the last of a request has
    an event.
    """
    if result.tokens and result.tokens[0] == ANONYMOUS_TOKEN:
        return _account_anonymous(flight, result, ledger, pool, now_ns)
    events = []
    caching, size, duration_ns = pool.prefix_caching, pool.block_size, result.duration_ns
    delivered = 0
    begun = ledger.groups[flight.plan.service].take_begun()
    # Once for every row of every step: this loop is most of what an update takes.
    for row, (one, count, token, logprobs) in enumerate(
        zip(
            flight.requests,
            flight.plan.new_tokens,
            _by_row(flight.plan, result.tokens),
            _by_row(flight.plan, result.logprobs),
            strict=True,
        )
    ):
        if row < begun:  # it was not told of the step, which is over now
            one.scheduled = one.expected
            one.expected += 1
        else:
            one.in_flight -= 1
        if one.ended:
            if not one.in_flight:
                ledger.release(one)
            continue
        one.computed += count
        one.charged_ns += duration_ns
        one.served_ns = now_ns
        if one.ending is not None:
            events.append(ledger.end(one, one.ending, now_ns))
            continue
        if token == NO_TOKEN:
            events.append(ledger.end(one, FinishReason.ERROR, now_ns, error=_NOT_FINITE))
            continue
        if token is not None:
            one.generated += 1
            if one.tokens:
                one.tokens.append(token)
            if one.generated == 1:
                one.first_token_ns = now_ns
            elif now_ns - one.last_token_ns > one.largest_gap_ns:
                one.largest_gap_ns = now_ns - one.last_token_ns
            one.last_token_ns = now_ns
        if caching and one.computed >= (one.published + 1) * size:
            ledger.publish(one)
        if token is not None:
            delivered += 1
            events.append(_receive(one, token, logprobs, ledger, now_ns))
    ledger.delivered(flight.plan.service, delivered)
    return events


def _account_anonymous(
    flight: Flight, result: StepResult, ledger: Ledger, pool: BlockPool, now_ns: int
) -> list[TokenEvent]:
    """The same for a simulated step: a few times as fast, because nearly no row has an event."""
    plan, size, duration_ns = flight.plan, pool.block_size, result.duration_ns
    caching, delivered = pool.prefix_caching, len(result.tokens)
    group = ledger.groups[plan.service]
    group.write_begun()
    cohort = group.cohort
    events, ridden = [], 0
    if flight.riders and flight.riders is cohort.rows:
        ridden = len(cohort.rows)
        cohort.advance(now_ns - duration_ns, (now_ns,))
        events = [end(one, ledger, now_ns) for one in cohort.pop_complete()]
    rows = len(flight.requests)
    sampled = result.tokens if len(result.tokens) == rows else _by_row(plan, result.tokens)
    for row in range(ridden, rows):
        one, token = flight.requests[row], sampled[row]
        one.in_flight -= 1
        if one.ended:
            delivered -= token is not None
            if not one.in_flight:
                ledger.release(one)
            continue
        one.computed = computed = one.computed + plan.new_tokens[row]
        one.charged_ns += duration_ns
        one.served_ns = now_ns
        if one.ending is not None:
            delivered -= token is not None
            events.append(ledger.end(one, one.ending, now_ns))
            continue
        if token is not None:
            one.generated = generated = one.generated + 1
            if one.tokens:
                one.tokens.append(token)
            if generated == 1:
                one.first_token_ns = now_ns
            elif now_ns - one.last_token_ns > one.largest_gap_ns:
                one.largest_gap_ns = now_ns - one.last_token_ns
            one.last_token_ns = now_ns
        if caching and computed >= (one.published + 1) * size:
            ledger.publish(one)
        if token is None:
            continue
        if one.prompt_tokens + generated >= one.last_token:
            events.append(end(one, ledger, now_ns))
            continue
        if generated >= one.predicted:
            _foresee(one, ledger)
        if one.tokens:
            cohort.settle()
        elif cohort.rows:
            cohort.join(one)
    ledger.delivered(plan.service, delivered)
    return events


def _by_row(plan: StepPlan, sampled: Sequence[T] | None) -> Sequence[T | None]:
    """What was sampled, by the plan's rows; None where nothing was."""
    if sampled is not None and len(sampled) == len(plan.sequences):
        return sampled
    rows: list[T | None] = [None] * len(plan.sequences)
    if sampled is not None:
        for row, value in zip(plan.sampled, sampled, strict=True):
            rows[row] = value
    return rows


def _receive(
    one: Tracked, token: int, logprobs: TokenLogprobs | None, ledger: Ledger, now_ns: int
) -> TokenEvent:
    known = None if logprobs is None else (logprobs,)
    if token in one.stops or one.known >= one.last_token:
        finish, stop_token = _judge(one, token)
        if finish is not None:
            return ledger.end(one, finish, now_ns, (token,), known, stop_token)
    if one.generated >= one.predicted:
        _foresee(one, ledger)
    return TokenEvent(one.request.id, (token,), known, cached_tokens=one.cached_tokens)


def end(one: Tracked, ledger: Ledger, now_ns: int) -> TokenEvent:
    """A request has all the tokens that it was to have, the last of them anonymous."""
    finish, _ = _judge(one, ANONYMOUS_TOKEN)
    assert finish is not None
    return ledger.end(one, finish, now_ns, (ANONYMOUS_TOKEN,))


def _foresee(one: Tracked, ledger: Ledger) -> None:
    """It has outgrown what was believed of its length."""
    group = ledger.groups[one.service]
    one.predicted = group.beliefs.predictor.predict(one.request, one.generated, one.ceiling)
    group.foresaw(one)


def _judge(one: Tracked, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether its newest output token ends a request, why, and with which stop token."""
    if token in one.stops and one.generated >= one.request.sampling.min_tokens:
        return FinishReason.STOP, token
    if one.request.true_output_tokens is not None and one.generated >= one.request.true_output_tokens:
        return FinishReason.STOP, None
    if one.generated >= one.ceiling:
        return FinishReason.LENGTH, None
    return None, None
