"""From a step's result to events: tokens arrive, blocks become final, requests end."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shoal.core import (
    ANONYMOUS_TOKEN,
    NO_TOKEN,
    Failure,
    FinishReason,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from shoal.kvcache import BlockPool
from shoal.schedule.plan_builder import InFlightStep, PlannedRows
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.results import split_result
from shoal.schedule.running_batch import ALL, IntArray, Rows, RunningBatch

_NOT_FINITE = Failure(
    "no token could be sampled: the model's logits were not finite; in float16 a model may overflow, try "
    "bfloat16 or float32"
)


class _End(NamedTuple):
    """Why a request ends, and its last tokens."""

    reason: FinishReason
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_token: int | None = None
    error: str | None = None


class _Outcome(NamedTuple):
    """What a plan's result means, by the place of a request among those that took part, in that order."""

    events: dict[int, TokenEvent]
    """Of those that got tokens that are told."""
    ends: dict[int, _End]
    """Of those that end."""
    made: int | IntArray
    """Tokens that each got."""
    postponed: Sequence[int] = ()
    """Those that go on when the executor is ready for them."""
    told: Mapping[int, tuple[tuple[TokenLogprobs, ...] | None, bytes | None]] = {}
    """Of those of whose prompts something is told: log-probabilities and embedding."""


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
        """Count what a plan produced; returns one event for each request that it changed, in the plan's
        order.

        Tokens are all anonymous or none is; of anonymous ones, which say nothing, only the last of a request
        has an event.
        """
        self._unpin(step)
        if len(step.parts) == 1:
            return self._process(step.parts[0], result, now_ns)
        events = []
        for rows, its_result in zip(step.parts, split_result(step.plan, result), strict=True):
            events += self._process(rows, its_result, now_ns)
        return events

    def _process(self, rows: PlannedRows, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """The same of one service."""
        plan = rows.plan
        batch = self._store.services[plan.service].running
        part = self._take_part(rows, batch)
        if not part.requests:
            return []
        duration_ns = result.duration_ns
        ends_ns = [now_ns - duration_ns + done for done in accumulate(result.durations_ns)]
        columns = _columns(plan, part)
        if result.tokens[0] and result.tokens[0][0] == ANONYMOUS_TOKEN:
            outcome = self._take_anonymous(batch, part, columns, len(result.tokens), ends_ns)
        else:
            outcome = self._take(batch, part, columns, result, ends_ns)
            if result.prompt_logprobs or result.embeddings:
                outcome = outcome._replace(told=_told_of_prompts(part, result))
        made = outcome.made
        if plan.iterations > 1:
            batch.advance(part.rows, made, duration_ns, now_ns)
            if isinstance(made, np.ndarray) or made < plan.iterations:
                batch.uncount_tokens(part.rows, plan.iterations - made)
        else:
            alike = plan.new_tokens.count(1) == len(plan.new_tokens)
            computed = 1 if alike else np.array(plan.new_tokens)[part.places]
            batch.advance(part.rows, computed, duration_ns, now_ns)
        if outcome.postponed:
            rows_waiting = np.arange(len(batch))[part.rows][outcome.postponed]
            batch.postpone(rows_waiting, computed=plan.iterations == 1)
        self._publish(batch, part)
        return self._tell(batch, part, outcome, now_ns)

    def rollback(self, step: InFlightStep) -> Sequence[RequestState]:
        """Undo what a plan that made nothing counted; returns those of its requests that still run.

        Blocks that it gave them stay with them.
        """
        self._unpin(step)
        running: list[RequestState] = []
        for rows in step.parts:
            plan = rows.plan
            batch = self._store.services[plan.service].running
            part = self._take_part(rows, batch)
            if part.requests:
                scheduled = np.array(plan.new_tokens) + plan.iterations - 1
                sampled = np.zeros(len(plan.seq_ids), dtype=np.int64)
                sampled[list(plan.sampled)] = plan.iterations
                batch.rollback(part.rows, scheduled[part.places], sampled[part.places])
                running += part.requests
        return running

    def _unpin(self, step: InFlightStep) -> None:
        """Free what was kept until the plan's copies were made."""
        if step.pinned_blocks:
            self._pool.free(step.plan.service, step.pinned_blocks)
        self._store.free_swapped(step.plan.service, step.swapped_blocks)

    def _take_part(self, planned: PlannedRows, batch: RunningBatch) -> _Part:
        """Who takes part in the result; those who ended before do not, and may free their blocks now."""
        if planned.num_removals == batch.num_removals:
            return _Part(planned.requests, ALL, planned.rows)
        rows, run = batch.rows_of(np.array(planned.plan.seq_ids))
        for place in (~run).nonzero()[0].tolist():
            request = planned.requests[place]
            request.in_flight -= 1
            if not request.in_flight:
                self._store.release(request)
        places = run.nonzero()[0]
        return _Part([planned.requests[place] for place in places.tolist()], places, rows[run])

    def _take_anonymous(
        self, batch: RunningBatch, part: _Part, columns: IntArray | None, count: int, ends_ns: Sequence[int]
    ) -> _Outcome:
        """``count`` tokens for each, of which only the time is known."""
        rows, requests = part.rows, part.requests
        receivers = requests
        ends: dict[int, _End] = {}
        if columns is None and not np.count_nonzero(batch.is_ending):
            batch.receive(rows, count, ends_ns)
        else:
            ending = batch.is_ending[rows] != 0
            for at in ending.nonzero()[0].tolist():
                reason = requests[at].ending
                assert reason is not None
                ends[at] = _End(reason)
            receiving = (~ending if columns is None else (columns >= 0) & ~ending).nonzero()[0]
            receivers = [requests[at] for at in receiving.tolist()]
            batch.receive(np.arange(len(batch))[rows][receiving], count, ends_ns)
        self._store.count_output(requests[0].service, count * len(receivers))
        for token_ids in [request.token_ids for request in receivers if request.token_ids]:
            token_ids += [ANONYMOUS_TOKEN] * count
        generated = batch.num_generated[rows]
        done = generated >= batch.num_final_tokens[rows] - batch.num_prompt_tokens[rows]
        for at in done.nonzero()[0].tolist():
            if at not in ends:
                reason, _ = requests[at].check_stop(ANONYMOUS_TOKEN, int(generated[at]))
                assert reason is not None  # it has all the tokens that it was to have
                ends[at] = _End(reason, (ANONYMOUS_TOKEN,))
        return _Outcome({}, ends, count)

    def _take(
        self,
        batch: RunningBatch,
        part: _Part,
        columns: IntArray | None,
        result: StepResult,
        ends_ns: Sequence[int],
    ) -> _Outcome:
        """The tokens of a model: each may end its request, and is told."""
        sampled = list(zip(*result.tokens, strict=True))
        places = range(len(part.requests)) if columns is None else columns.tolist()
        generated = batch.num_generated[part.rows].tolist()
        limits = (batch.num_final_tokens[part.rows] - batch.num_prompt_tokens[part.rows]).tolist()
        events: dict[int, TokenEvent] = {}
        ends: dict[int, _End] = {}
        receivers, counts, postponed = [], [], []
        # Once for every row of every step: this loop is most of what an update takes.
        for at, (request, column, before, limit) in enumerate(
            zip(part.requests, places, generated, limits, strict=True)
        ):
            if request.ending is not None:
                ends[at] = _End(request.ending)
                continue
            if column < 0:
                continue
            ids = sampled[column] if result.counts is None else sampled[column][: result.counts[column]]
            logprobs = None if result.logprobs is None else _logprobs(result.logprobs, column, len(ids))
            if NO_TOKEN in ids:
                ids = ids[: ids.index(NO_TOKEN)]
                if column in result.postponed:
                    postponed.append(at)
                else:
                    failure = result.failures.get(column, _NOT_FINITE)
                    ends[at] = _End(failure.finish, ids, logprobs and logprobs[: len(ids)], error=failure.why)
                    request.ending = failure.finish  # so that nobody else finds its KV
                if not ids:
                    continue
            elif before + len(ids) >= limit or not request.stop_token_ids.isdisjoint(ids):
                ids, reason, stop_token = _until_end(request, ids, before)
                if reason is not None:
                    ends[at] = _End(reason, ids, logprobs and logprobs[: len(ids)], stop_token)
            request.token_ids += ids
            cached, queue_ns = request.num_cached_tokens, 0 if before else request.queue_ns
            events[at] = TokenEvent(
                request.request.id, ids, logprobs, None, None, None, cached, queue_ns, None, None, before
            )
            receivers.append(at)
            counts.append(len(ids))
        self._store.count_output(part.requests[0].service, sum(counts))
        made: int | IntArray = 1
        if postponed or counts.count(1) < len(counts):
            made = np.zeros(len(part.requests), dtype=np.int64)
            made[receivers] = counts
        if len(receivers) == len(part.requests):
            batch.receive(part.rows, made, ends_ns)
        else:
            rows = np.arange(len(batch))[part.rows][receivers]
            batch.receive(rows, made if isinstance(made, int) else made[receivers], ends_ns)
        return _Outcome(events, ends, made, postponed)

    def _publish(self, batch: RunningBatch, part: _Part) -> None:
        """Offer full blocks to the prefix index."""
        if not self._pool.prefix_caching:
            return
        full = batch.num_computed >= (batch.num_published + 1) * self._pool.block_size
        if np.count_nonzero(full):
            rows = np.arange(len(batch))[part.rows]
            going_on = [row for row in rows[full[rows]].tolist() if batch.requests[row].ending is None]
            self._store.publish(batch, going_on)

    def _tell(self, batch: RunningBatch, part: _Part, outcome: _Outcome, now_ns: int) -> list[TokenEvent]:
        """The events, for which requests that end leave the batch; others may have outgrown predictions."""
        events, ends, told = outcome.events, outcome.ends, outcome.told
        outgrown = batch.num_generated[part.rows] >= batch.predicted_tokens[part.rows]
        places = {*outgrown.nonzero()[0].tolist(), *ends}
        for at in sorted(places):
            request, end = part.requests[at], ends.get(at)
            if end is None:
                self._predict(batch, request)
            else:
                reason, ids, logprobs, stop_token, error = end
                events[at] = self._store.end(request, reason, now_ns, ids, logprobs, stop_token, error)
        for at, (logprobs, embedding) in told.items():
            request = part.requests[at]
            event = events.get(at) or self._no_tokens(batch, request)
            events[at] = event._replace(prompt_logprobs=logprobs, embedding=embedding)
        return [events[at] for at in sorted(events)] if ends or told else list(events.values())

    def _no_tokens(self, batch: RunningBatch, request: RequestState) -> TokenEvent:
        """The event of a request that got no token."""
        return TokenEvent(
            request.request.id,
            cached_tokens=request.num_cached_tokens,
            position=int(batch.num_generated[batch.row_of(request)]),
        )

    def _predict(self, batch: RunningBatch, request: RequestState) -> None:
        """It has outgrown what was predicted of its length."""
        row = batch.row_of(request)
        predictor = self._store.services[request.service].statistics.predictor
        batch.predicted_tokens[row] = predictor.predict(
            request.request, int(batch.num_generated[row]), request.max_new_tokens
        )


def _columns(plan: StepPlan, part: _Part) -> IntArray | None:
    """Each one's column in the result's tokens, -1 for none; None: its own row."""
    if len(plan.sampled) == len(plan.seq_ids) and isinstance(part.places, slice):
        return None
    columns = np.full(len(plan.seq_ids), -1)
    columns[list(plan.sampled)] = np.arange(len(plan.sampled))
    return columns[part.places]


def _told_of_prompts(
    part: _Part, result: StepResult
) -> dict[int, tuple[tuple[TokenLogprobs, ...] | None, bytes | None]]:
    """What is told of prompts, each of their tokens once although a preemption makes it computed again."""
    places = range(len(part.requests)) if isinstance(part.places, slice) else part.places.tolist()
    told = {}
    for at, row in enumerate(places):
        request, logprobs = part.requests[at], None
        if (scored := result.prompt_logprobs.get(row)) is not None:
            known = max(1, request.num_scored_tokens) - scored.first
            logprobs = tuple(scored.entries[max(0, known) :]) or None
            request.num_scored_tokens = max(request.num_scored_tokens, scored.first + len(scored.entries))
        embedding = result.embeddings.get(row)
        if logprobs or embedding:
            told[at] = (logprobs, embedding)
    return told


def _logprobs(
    logprobs: Sequence[Sequence[TokenLogprobs | None]], column: int, count: int
) -> tuple[TokenLogprobs, ...] | None:
    """Of the first tokens in a column; None where the request wants none."""
    return tuple([known for row in logprobs[:count] if (known := row[column]) is not None]) or None


def _until_end(
    request: RequestState, ids: Sequence[int], generated: int
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Tokens up to the one that ends a request, if any does, why, and with which stop token."""
    for count, token in enumerate(ids, start=1):
        finish, stop_token = request.check_stop(token, generated + count)
        if finish is not None:
            return tuple(ids[:count]), finish, stop_token
    return tuple(ids), None, None
