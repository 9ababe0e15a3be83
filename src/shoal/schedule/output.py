"""From a step's result to events: tokens arrive, blocks become final, requests end."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

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
from shoal.schedule.planning import InFlightStep
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import ALL, IntArray, Rows, RunningBatch

_NOT_FINITE = "the model's logits were not finite; in float16 a model may overflow, try bfloat16 or float32"


class _Output(NamedTuple):
    """What a plan's result means for one request: its new tokens, and whether it ends."""

    request: RequestState
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


class _Part(NamedTuple):
    """Requests that took part in a plan and still run, in its order."""

    requests: Sequence[RequestState]
    places: IntArray | slice
    """Their rows in the plan."""
    rows: Rows
    """Their rows in the running batch."""


class OutputProcessor:
    """Counts what plans computed, gives requests their tokens, and ends those that are complete."""

    def __init__(self, pool: BlockPool, store: RequestStore) -> None:
        self._pool = pool
        self._store = store

    def process(self, step: InFlightStep, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Count what a plan produced; returns one event for each request that it changed, in the plan's order.

        Tokens are all anonymous or none is; of anonymous ones, which say nothing, only the last of a request
        has an event.
        """
        plan = step.plan
        batch = self._store.services[plan.service].running
        part = self._still_running(step, batch)
        if not part.requests:
            return []
        batch.spend(part.rows, result.duration_ns, now_ns)
        ends_ns = [now_ns - result.duration_ns + done for done in accumulate(result.durations_ns)]
        columns = _columns(step, part)
        if result.tokens and result.tokens[0] and result.tokens[0][0] == ANONYMOUS_TOKEN:
            outputs, made = self._take_anonymous(batch, part, columns, len(result.tokens), ends_ns)
        else:
            outputs, made = self._take(batch, part, columns, result, ends_ns)
        if plan.iterations > 1:
            batch.advance(part.rows, made)
            batch.withdraw(part.rows, plan.iterations - made)
        elif plan.new_tokens.count(1) == len(plan.new_tokens):
            batch.advance(part.rows, 1)
        else:
            batch.advance(part.rows, np.array(plan.new_tokens)[part.places])
        self._publish(batch, part)
        return self._tell(batch, outputs, now_ns)

    def _still_running(self, step: InFlightStep, batch: RunningBatch) -> _Part:
        if step.num_removals == batch.num_removals:
            return _Part(step.requests, ALL, step.rows)
        rows, run = batch.rows_of(np.array(step.plan.seq_ids))
        for place in (~run).nonzero()[0].tolist():
            request = step.requests[place]
            request.in_flight -= 1
            if not request.in_flight:
                self._store.release(request)
        places = run.nonzero()[0]
        return _Part([step.requests[place] for place in places.tolist()], places, rows[run])

    def _take_anonymous(
        self, batch: RunningBatch, part: _Part, columns: IntArray | None, count: int, ends_ns: Sequence[int]
    ) -> tuple[list[_Output], int | IntArray]:
        """``count`` tokens for each, of which only the time is known: nearly nobody has anything to be told."""
        rows, requests = part.rows, part.requests
        receivers = requests
        ending = batch.ending[rows] != 0
        if columns is None and not ending.any():
            batch.receive(rows, count, ends_ns)
        else:
            receiving = (~ending if columns is None else (columns >= 0) & ~ending).nonzero()[0]
            receivers = [requests[at] for at in receiving.tolist()]
            batch.receive(np.arange(len(batch))[rows][receiving], count, ends_ns)
        self._store.count_output(requests[0].service, count * len(receivers))
        for request in receivers:
            if request.token_ids:
                request.token_ids += [ANONYMOUS_TOKEN] * count
        generated = batch.num_generated[rows]
        done = batch.num_prompt_tokens[rows] + generated >= batch.num_final_tokens[rows]
        outputs = []
        for at in (ending | done | (generated >= batch.predicted_tokens[rows])).nonzero()[0].tolist():
            request = requests[at]
            if ending[at]:
                outputs.append(_Output(request, finish=request.ending))
            elif done[at]:
                reason, _ = _judge(request, ANONYMOUS_TOKEN, int(generated[at]))
                outputs.append(_Output(request, (ANONYMOUS_TOKEN,), finish=reason))
            else:
                outputs.append(_Output(request))
        return outputs, count

    def _take(
        self,
        batch: RunningBatch,
        part: _Part,
        columns: IntArray | None,
        result: StepResult,
        ends_ns: Sequence[int],
    ) -> tuple[list[_Output], int | IntArray]:
        """The tokens of a model: each may end its request. Also returns how many each got."""
        sampled = list(zip(*result.tokens, strict=True))
        places = range(len(part.requests)) if columns is None else columns.tolist()
        generated = batch.num_generated[part.rows].tolist()
        limits = (batch.num_final_tokens[part.rows] - batch.num_prompt_tokens[part.rows]).tolist()
        outputs, receivers, counts = [], [], []
        # Once for every row of every step: this loop is most of what an update takes.
        for at, (request, column, before, limit) in enumerate(
            zip(part.requests, places, generated, limits, strict=True)
        ):
            if request.ending is not None:
                outputs.append(_Output(request, finish=request.ending))
                continue
            if column < 0:
                continue
            ids = sampled[column] if result.counts is None else sampled[column][: result.counts[column]]
            if NO_TOKEN in ids:
                ids = ids[: ids.index(NO_TOKEN)]
                logprobs = _logprobs(result, column, len(ids)) if ids else None
                outputs.append(_Output(request, ids, logprobs, FinishReason.ERROR, error=_NOT_FINITE))
                request.ending = FinishReason.ERROR  # so that nobody else finds its KV
                continue
            finish = stop_token = None
            if before + len(ids) >= limit or not request.stop_token_ids.isdisjoint(ids):
                ids, finish, stop_token = _until_end(request, ids, before)
            request.token_ids += ids
            outputs.append(_Output(request, ids, _logprobs(result, column, len(ids)), finish, stop_token))
            receivers.append(at)
            counts.append(len(ids))
        self._store.count_output(batch.requests[0].service, sum(counts))
        made: int | IntArray = 1
        if counts.count(1) < len(counts):
            made = np.zeros(len(part.requests), dtype=np.int64)
            made[receivers] = counts
        if len(receivers) == len(part.requests):
            batch.receive(part.rows, made, ends_ns)
        else:
            rows = np.arange(len(batch))[part.rows][receivers]
            batch.receive(rows, made if isinstance(made, int) else made[receivers], ends_ns)
        return outputs, made

    def _publish(self, batch: RunningBatch, part: _Part) -> None:
        """Offer full blocks to the prefix index."""
        if not self._pool.prefix_caching:
            return
        full = batch.num_computed >= (batch.num_published + 1) * self._pool.block_size
        if full.any():
            rows = np.arange(len(batch))[part.rows]
            for row in rows[full[rows]].tolist():
                if batch.requests[row].ending is None:
                    self._store.publish(batch, row)

    def _tell(self, batch: RunningBatch, outputs: Sequence[_Output], now_ns: int) -> list[TokenEvent]:
        """The events, of which those that end a request take it out of the batch."""
        outgrown = {
            batch.requests[row].number
            for row in (batch.num_generated >= batch.predicted_tokens).nonzero()[0].tolist()
        }
        events = []
        for request, ids, logprobs, finish, stop_token, error in outputs:
            if finish is not None:
                events.append(self._store.end(request, finish, now_ns, ids, logprobs, stop_token, error))
                continue
            if request.number in outgrown:
                self._predict(batch, request)
            if ids:
                events.append(
                    TokenEvent(request.request.id, ids, logprobs, cached_tokens=request.num_cached_tokens)
                )
        return events

    def _predict(self, batch: RunningBatch, request: RequestState) -> None:
        """It has outgrown what was predicted of its length."""
        row = batch.row_of(request)
        predictor = self._store.services[request.service].statistics.predictor
        batch.predicted_tokens[row] = predictor.predict(
            request.request, int(batch.num_generated[row]), request.max_new_tokens
        )


def _columns(step: InFlightStep, part: _Part) -> IntArray | None:
    """Each one's column in the result's tokens, -1 for none; None: its own row."""
    plan = step.plan
    if len(plan.sampled) == len(plan.seq_ids) and isinstance(part.places, slice):
        return None
    columns = np.full(len(plan.seq_ids), -1)
    columns[list(plan.sampled)] = np.arange(len(plan.sampled))
    return columns[part.places]


def _logprobs(result: StepResult, column: int, count: int) -> tuple[TokenLogprobs, ...] | None:
    """Of the first tokens in a column; None where the request wants none."""
    if result.logprobs is None:
        return None
    wanted = [row[column] for row in result.logprobs[:count]]
    return None if wanted[0] is None else tuple([logprobs for logprobs in wanted if logprobs is not None])


def _until_end(
    request: RequestState, ids: Sequence[int], generated: int
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Tokens up to the one that ends a request, if any does, why, and with which stop token."""
    for count, token in enumerate(ids, start=1):
        finish, stop_token = _judge(request, token, generated + count)
        if finish is not None:
            return tuple(ids[:count]), finish, stop_token
    return tuple(ids), None, None


def _judge(request: RequestState, token: int, generated: int) -> tuple[FinishReason | None, int | None]:
    """Whether the newest of ``generated`` output tokens ends a request, why, and with which stop token."""
    if token in request.stop_token_ids and generated >= request.request.sampling.min_tokens:
        return FinishReason.STOP, token
    true_tokens = request.request.true_output_tokens
    if true_tokens is not None and generated >= true_tokens:
        return FinishReason.STOP, None
    if generated >= request.max_new_tokens:
        return FinishReason.LENGTH, None
    return None, None


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Refuse a result that cannot be of this plan; raises ValueError."""
    wanted = len(plan.sampled)
    for tokens in result.tokens:
        if len(tokens) != wanted:
            raise ValueError(f"plan {plan.number} samples {wanted} tokens, got {len(tokens)}")
    if not 1 <= len(result.tokens) <= plan.iterations:
        raise ValueError(
            f"plan {plan.number} has {plan.iterations} iterations, got tokens of {len(result.tokens)}"
        )
    if not 1 <= len(result.durations_ns) <= len(result.tokens):
        raise ValueError(
            f"plan {plan.number} has {len(result.tokens)} tokens of a row, got {len(result.durations_ns)} times"
        )
