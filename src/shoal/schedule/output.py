"""Processing of step results: new tokens, stop tokens, ends, finished requests, prefix cache, events."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
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
from shoal.schedule.request_state import RequestState, last_event
from shoal.schedule.request_store import RequestStore
from shoal.schedule.results import split_result
from shoal.schedule.running_batch import ALL, IntArray, Rows, RunningBatch
from shoal.schedule.step_tracker import InFlightStep, PlannedRows

_NOT_FINITE = Failure(
    "no token could be sampled: the model's logits were not finite; in float16 a model may overflow, try "
    "bfloat16 or float32"
)


class _Outcome(NamedTuple):
    """Interpreted result of a plan, keyed by the index of a request in its ``_Part``."""

    events: dict[int, TokenEvent]
    """For requests that end, and for those with new tokens, except simulated ones."""
    ends: Sequence[int]
    """Requests that end."""
    num_new: int | IntArray
    """Number of new tokens, of all or of each request."""
    postponed: Sequence[int] = ()
    """Requests that continue when the executor is ready for them."""
    prompt_outputs: Mapping[int, tuple[tuple[TokenLogprobs, ...] | None, bytes | None]] = {}
    """Log-probabilities and embedding of prompts, for requests that want them."""


class _Part(NamedTuple):
    """The requests of a plan that are still running, in its order."""

    requests: Sequence[RequestState]
    places: IntArray | slice
    """Their rows in the plan."""
    rows: Rows
    """Their rows in the running batch."""


class OutputProcessor:
    """Updates requests with the results of plans: progress, new tokens, prefix cache, ends."""

    def __init__(self, pool: BlockPool, store: RequestStore) -> None:
        self._pool = pool
        self._store = store

    def process(self, step: InFlightStep, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Apply a plan's result; returns one event for each changed request, in the plan's order.

        Either all tokens are anonymous or none is. Anonymous tokens make no event, except the last of a
        request.
        """
        self._unpin(step)
        if len(step.parts) == 1:
            return self._process(step.parts[0], result, now_ns)
        if not step.parts:
            return []
        events = []
        for rows, part_result in zip(step.parts, split_result(step.plan, result), strict=True):
            events += self._process(rows, part_result, now_ns)
        return events

    def _process(self, rows: PlannedRows, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """``process`` for the rows of one service."""
        plan = rows.plan
        batch = self._store.services[plan.service].running
        part = self._running_part(rows, batch)
        if not part.requests:
            return []
        duration_ns = result.duration_ns
        ends_ns = [now_ns - duration_ns + done for done in accumulate(result.durations_ns)]
        columns = _columns(plan, part)
        if result.tokens[0] and result.tokens[0][0] == ANONYMOUS_TOKEN:
            outcome = self._process_anonymous(batch, part, columns, len(result.tokens), ends_ns)
        else:
            outcome = self._process_tokens(batch, part, columns, result, ends_ns)
            if result.prompt_logprobs or result.embeddings:
                outcome = outcome._replace(prompt_outputs=_prompt_outputs(part, result))
        num_new = outcome.num_new
        if plan.iterations > 1:
            batch.advance(part.rows, num_new, duration_ns, now_ns)
            if isinstance(num_new, np.ndarray) or num_new < plan.iterations:
                batch.uncount_tokens(part.rows, plan.iterations - num_new)
        else:
            only_decodes = plan.new_tokens.count(1) == len(plan.new_tokens)
            computed = 1 if only_decodes else np.array(plan.new_tokens)[part.places]
            batch.advance(part.rows, computed, duration_ns, now_ns)
        if outcome.postponed:
            rows_waiting = np.arange(len(batch))[part.rows][outcome.postponed]
            batch.postpone(rows_waiting, computed=plan.iterations == 1)
        self._publish(batch, part)
        return self._make_events(batch, part, outcome, now_ns)

    def rollback(self, step: InFlightStep) -> Sequence[RequestState]:
        """Undo the progress of a plan that failed; returns its requests that are still running.

        Blocks that it allocated stay in their block tables.
        """
        self._unpin(step)
        running: list[RequestState] = []
        for rows in step.parts:
            plan = rows.plan
            batch = self._store.services[plan.service].running
            part = self._running_part(rows, batch)
            if part.requests:
                scheduled = np.array(plan.new_tokens) + plan.iterations - 1
                sampled = np.zeros(len(plan.seq_ids), dtype=np.int64)
                sampled[list(plan.sampled)] = plan.iterations
                batch.rollback(part.rows, scheduled[part.places], sampled[part.places])
                running += part.requests
        return running

    def _unpin(self, step: InFlightStep) -> None:
        """Free the blocks that the plan's copies read."""
        if step.pinned_blocks:
            self._pool.free(step.plan.service, step.pinned_blocks)
        self._store.free_swapped(step.plan.service, step.swapped_blocks)

    def _running_part(self, planned: PlannedRows, batch: RunningBatch) -> _Part:
        """The requests still running; those that ended before the result may free their blocks now."""
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

    def _process_anonymous(
        self, batch: RunningBatch, part: _Part, columns: IntArray | None, count: int, ends_ns: Sequence[int]
    ) -> _Outcome:
        """``count`` simulated tokens for each, of which only the time is known."""
        rows, requests = part.rows, part.requests
        receivers = requests
        ends: dict[int, tuple[FinishReason, tuple[int, ...]]] = {}
        if columns is None and not np.count_nonzero(batch.is_ending):
            batch.receive(rows, count, ends_ns)
        else:
            ending = batch.is_ending[rows] != 0
            for at in ending.nonzero()[0].tolist():
                reason = requests[at].ending
                assert reason is not None
                ends[at] = reason, ()
            receiving = (~ending if columns is None else (columns >= 0) & ~ending).nonzero()[0]
            receivers = [requests[at] for at in receiving.tolist()]
            batch.receive(np.arange(len(batch))[rows][receiving], count, ends_ns)
        self._store.count_output(requests[0].service, count * len(receivers))
        if self._store.has_accounts:
            self._store.charge_output(receivers, repeat(count))
        for token_ids in [request.token_ids for request in receivers if request.token_ids]:
            token_ids += [ANONYMOUS_TOKEN] * count
        generated = batch.num_generated[rows]
        done = generated >= batch.num_final_tokens[rows] - batch.num_prompt_tokens[rows]
        for at in done.nonzero()[0].tolist():
            if at not in ends:
                reason, _ = requests[at].check_stop(ANONYMOUS_TOKEN, int(generated[at]))
                assert reason is not None  # its output is complete
                ends[at] = reason, (ANONYMOUS_TOKEN,)
        events = {
            at: last_event(requests[at], int(generated[at]) - len(tokens), reason, tokens)
            for at, (reason, tokens) in ends.items()
        }
        return _Outcome(events, list(ends), count)

    def _process_tokens(
        self,
        batch: RunningBatch,
        part: _Part,
        columns: IntArray | None,
        result: StepResult,
        ends_ns: Sequence[int],
    ) -> _Outcome:
        """Sampled tokens, each of which may end its request."""
        sampled = list(zip(*result.tokens, strict=True))
        places = range(len(part.requests)) if columns is None else columns.tolist()
        generated = batch.num_generated[part.rows].tolist()
        limits = (batch.num_final_tokens[part.rows] - batch.num_prompt_tokens[part.rows]).tolist()
        events: dict[int, TokenEvent] = {}
        ends, receivers, counts, postponed = [], [], [], []
        # This loop over the rows takes most of the time of an update.
        for at, (request, column, before, limit) in enumerate(
            zip(part.requests, places, generated, limits, strict=True)
        ):
            if request.ending is not None:
                events[at] = last_event(request, before, request.ending)
                ends.append(at)
                continue
            if column < 0:
                continue
            ids = sampled[column] if result.counts is None else sampled[column][: result.counts[column]]
            logprobs = None if result.logprobs is None else _logprobs(result.logprobs, column, len(ids))
            finish: FinishReason | None = None
            stop_token, error = None, None
            if NO_TOKEN in ids:
                ids = ids[: ids.index(NO_TOKEN)]
                if column in result.postponed:
                    postponed.append(at)
                    if not ids:
                        continue
                else:
                    error, finish = result.failures.get(column, _NOT_FINITE)
                    request.ending = finish  # so that its KV is not published
            elif before + len(ids) >= limit or not request.stop_token_ids.isdisjoint(ids):
                ids, finish, stop_token = _until_stop(request, ids, before)
            cached, queue_ns = request.num_cached_tokens, 0 if before else request.queue_ns
            if finish is not None:
                ends.append(at)
                logprobs, queue_ns = logprobs and logprobs[: len(ids)], request.queue_ns
            events[at] = TokenEvent(
                request.request.id,
                ids,
                logprobs,
                finish,
                stop_token,
                error,
                cached,
                queue_ns,
                None,
                None,
                before,
            )
            if ids:
                request.token_ids += ids
                receivers.append(at)
                counts.append(len(ids))
        self._store.count_output(part.requests[0].service, sum(counts))
        if self._store.has_accounts:
            self._store.charge_output([part.requests[at] for at in receivers], counts)
        num_new: int | IntArray = 1
        if postponed or counts.count(1) < len(counts):
            num_new = np.zeros(len(part.requests), dtype=np.int64)
            num_new[receivers] = counts
        if len(receivers) == len(part.requests):
            batch.receive(part.rows, num_new, ends_ns)
        else:
            rows = np.arange(len(batch))[part.rows][receivers]
            batch.receive(rows, num_new if isinstance(num_new, int) else num_new[receivers], ends_ns)
        return _Outcome(events, ends, num_new, postponed)

    def _publish(self, batch: RunningBatch, part: _Part) -> None:
        """Publish full blocks in the prefix index."""
        if not self._pool.prefix_caching:
            return
        full = batch.num_computed >= (batch.num_published + 1) * self._pool.block_size
        if np.count_nonzero(full):
            rows = np.arange(len(batch))[part.rows]
            continuing = [row for row in rows[full[rows]].tolist() if batch.requests[row].ending is None]
            self._store.publish(batch, continuing)

    def _make_events(
        self, batch: RunningBatch, part: _Part, outcome: _Outcome, now_ns: int
    ) -> list[TokenEvent]:
        """End finished requests, update outgrown length predictions, and return the events."""
        events, ends, prompt_outputs = outcome.events, set(outcome.ends), outcome.prompt_outputs
        outgrown = batch.num_generated[part.rows] >= batch.predicted_tokens[part.rows]
        for at in sorted({*outgrown.nonzero()[0].tolist(), *ends}):
            request = part.requests[at]
            if at not in ends:
                self._predict(batch, request)
                continue
            reason = events[at].finish
            assert reason is not None
            self._store.finish(request, reason, now_ns)
        for at, (logprobs, embedding) in prompt_outputs.items():
            request = part.requests[at]
            event = events.get(at) or self._empty_event(batch, request)
            events[at] = event._replace(prompt_logprobs=logprobs, embedding=embedding)
        return [events[at] for at in sorted(events)] if ends or prompt_outputs else list(events.values())

    def _empty_event(self, batch: RunningBatch, request: RequestState) -> TokenEvent:
        """The event of a request without a new token."""
        return TokenEvent(
            request.request.id,
            cached_tokens=request.num_cached_tokens,
            position=int(batch.num_generated[batch.row_of(request)]),
        )

    def _predict(self, batch: RunningBatch, request: RequestState) -> None:
        """Predict the length of a request again that has outgrown its prediction."""
        row = batch.row_of(request)
        predictor = self._store.services[request.service].statistics.predictor
        batch.predicted_tokens[row] = predictor.predict(
            request.request, int(batch.num_generated[row]), request.max_new_tokens
        )


def _columns(plan: StepPlan, part: _Part) -> IntArray | None:
    """Column of each request in the result's tokens, -1 for none; None: column i for request i."""
    if len(plan.sampled) == len(plan.seq_ids) and isinstance(part.places, slice):
        return None
    columns = np.full(len(plan.seq_ids), -1)
    columns[list(plan.sampled)] = np.arange(len(plan.sampled))
    return columns[part.places]


def _prompt_outputs(
    part: _Part, result: StepResult
) -> dict[int, tuple[tuple[TokenLogprobs, ...] | None, bytes | None]]:
    """New prompt log-probabilities and embeddings; tokens recomputed after a preemption are not repeated."""
    places = range(len(part.requests)) if isinstance(part.places, slice) else part.places.tolist()
    outputs = {}
    for at, row in enumerate(places):
        request, logprobs = part.requests[at], None
        if (scored := result.prompt_logprobs.get(row)) is not None:
            known = max(1, request.num_scored_tokens) - scored.first
            logprobs = tuple(scored.entries[max(0, known) :]) or None
            request.num_scored_tokens = max(request.num_scored_tokens, scored.first + len(scored.entries))
        embedding = result.embeddings.get(row)
        if logprobs or embedding:
            outputs[at] = (logprobs, embedding)
    return outputs


def _logprobs(
    logprobs: Sequence[Sequence[TokenLogprobs | None]], column: int, count: int
) -> tuple[TokenLogprobs, ...] | None:
    """Of the first ``count`` tokens in a column; None if the request wants none."""
    return tuple([known for row in logprobs[:count] if (known := row[column]) is not None]) or None


def _until_stop(
    request: RequestState, ids: Sequence[int], generated: int
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Tokens up to the one that ends the request, the reason, and the stop token, if any."""
    for count, token in enumerate(ids, start=1):
        finish, stop_token = request.check_stop(token, generated + count)
        if finish is not None:
            return tuple(ids[:count]), finish, stop_token
    return tuple(ids), None, None
