"""Token masks of a step's rows that follow a grammar: requested before the forward pass, collected after it.

Grammar workers compute masks while the model computes logits. A row whose mask is missing after the forward
pass is postponed: its sequence continues with a step after the mask has arrived. No step waits for a
process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import Failure
from shoal.execute.grammar.pool import GrammarPool
from shoal.execute.grammar.worker import MaskRequest
from shoal.execute.sequences import RunningSequence

MASK_WAIT_S = 0.001
"""Longest wait of a step for missing masks: shorter than computing a row again."""
_NO_LEASE = Failure("the grammar of the request has no place in this engine")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of the allowed tokens of some rows of a step."""

    rows: list[int]
    bits: np.ndarray
    """uint32 [len(rows), words]: bit b of word w says whether token 32 * w + b is allowed."""
    failures: dict[int, Failure]
    """Rows that will have no mask, and why."""
    postponed: frozenset[int] = frozenset()
    """Rows whose masks have not arrived yet."""


class GrammarMasks:
    """Token masks of one executor's sequences. ``ready`` may be called by any thread, the rest by its own."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool
        self._requests: dict[int, MaskRequest] = {}
        """The latest request of each sequence, by sequence id."""
        self._rows: list[tuple[int, MaskRequest]] = []
        """Row and request of the present step."""

    def begin(self, service: str, rows: Sequence[tuple[int, RunningSequence]]) -> None:
        """Request masks for those of a step's rows (id and sequence) that have grammars."""
        self._rows = [
            (place, self._request(service, number, row))
            for place, (number, row) in enumerate(rows)
            if row.sampling.grammar is not None
        ]

    @property
    def complete(self) -> bool:
        """Whether all masks of the present step have arrived."""
        return all(request.done for _, request in self._rows)

    def finish(self) -> RowMasks | None:
        """The masks of the present step that have arrived; None if it has no grammars."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        with self._pool.answered:
            self._pool.answered.wait_for(lambda: all(request.done for _, request in rows), MASK_WAIT_S)
        done = [(place, request) for place, request in rows if request.done]
        masks = {place: request.mask for place, request in done if request.mask is not None}
        return RowMasks(
            list(masks),
            np.stack(list(masks.values())) if masks else np.zeros((0, 0), np.uint32),
            {place: request.failure for place, request in done if request.failure is not None},
            frozenset([place for place, _ in rows]) - {place for place, _ in done},
        )

    def leave(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            request = self._requests.pop(number, None)
            if request is not None and request.worker is not None:
                request.worker.forget(number)

    def ready(self, numbers: Iterable[int]) -> list[int]:
        """The sequences whose masks have arrived or will not come."""
        requests = self._requests
        return [number for number in numbers if number not in requests or requests[number].done]

    def _request(self, service: str, number: int, row: RunningSequence) -> MaskRequest:
        """The pending mask request for the next token of a sequence, or a new one."""
        request = self._requests.get(number)
        if request is not None and request.end == len(row.tokens):
            return request  # it was postponed, or its step failed
        assert row.sampling.grammar is not None
        worker = self._pool.find(service, row.sampling.grammar) if request is None else request.worker
        request = self._requests[number] = MaskRequest(number, row.tokens, row.prompt_tokens, worker)
        if worker is None:
            request.finish(None, _NO_LEASE)
        else:
            worker.submit(request)
        return request
