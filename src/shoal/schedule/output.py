"""From a step's result to events: tokens arrive, blocks become final, requests end."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from shoal.core import (
    ANONYMOUS_TOKEN,
    NO_TOKEN,
    FinishReason,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from shoal.kvcache import BlockPool
from shoal.schedule.planning import InFlightStep
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import ALL, BoolArray, IntArray, Rows, RunningBatch

_NOT_FINITE = "the model's logits were not finite; in float16 a model may overflow, try bfloat16 or float32"


class OutputProcessor:
    """Counts what plans computed, gives requests their tokens, and ends those that are complete."""

    def __init__(self, pool: BlockPool, store: RequestStore) -> None:
        self._pool = pool
        self._store = store

    def process(self, step: InFlightStep, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Count what a plan produced; returns one event for each request that it changed.

        Tokens are all anonymous or none is; of anonymous ones, which say nothing, only the last of a request
        has an event.
        """
        plan = step.plan
        batch = self._store.services[plan.service].running
        places, rows, requests = self._still_running(step, batch)
        if not requests:
            return []
        batch.spend(rows, result.duration_ns, now_ns)
        batch.advance(rows, 1 if plan.decodes_only else np.array(plan.new_tokens)[places])
        if len(plan.sampled) == len(plan.sequences) and not batch.ending[rows].any():
            receiving, columns = rows, places
        else:
            receiving, columns, requests = self._receivers(step, batch, places, rows, requests)
        tokens = result.tokens
        if tokens and tokens[0][0] == ANONYMOUS_TOKEN:
            return self._take_anonymous()
