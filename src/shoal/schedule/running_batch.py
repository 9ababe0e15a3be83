"""RunningBatch: the running requests of a service as columns of numbers (tokens, blocks, times)."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter, sub
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.schedule.request_state import RequestState

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]
Rows = IntArray | slice
"""Rows of a table; ``ALL``: every row."""

ALL = slice(None)

# Constant for a running request; then columns that steps change.
_FIXED = (
    "seq_id",
    "number",
    "num_prompt_tokens",
    "max_new_tokens",
    "num_final_tokens",
    "forecast_seed",
    "arrival_ns",
    "priority",
    "num_preempted_by_starvation",
)
_PROGRESS = (
    "num_generated",
    "num_scheduled",
    "num_computed",
    "num_published",
    "in_flight",
    "slice_end",
    "predicted_tokens",
    "service_time_ns",
    "last_scheduled_ns",
    "first_token_ns",
    "last_token_ns",
    "largest_gap_ns",
)
_STATES = ("num_tokens_with_in_flight", "num_blocks", "prefilling", "is_ending", "postponed")
_COLUMNS = (*_FIXED, *_PROGRESS, *_STATES)
_GOALS = ("ttft_s", "tpot_s", "mtpot_s", "e2e_s")
_FIRST_PROGRESS, _END_PROGRESS = len(_FIXED), len(_FIXED) + len(_PROGRESS)
_NAMES = frozenset(_COLUMNS + _GOALS)
_read = attrgetter(*_COLUMNS)
_read_goals = attrgetter(*_GOALS)


class RequestTable:
    """Requests with their numbers as arrays [n], which policies compute with.

    There is no separate prefill phase: a step computes some of the missing tokens, one for a decode and
    several for a prompt.

        |<- computed ->|<- in flight ->|<-    missing    ->|
        0       num_computed    num_scheduled    num_tokens_with_in_flight

    Arrays are views, valid until the table changes.
    """

    requests: list[RequestState]

    # See RequestState.
    number: IntArray
    num_prompt_tokens: IntArray
    max_new_tokens: IntArray
    num_final_tokens: IntArray
    forecast_seed: IntArray
    arrival_ns: IntArray
    priority: IntArray
    num_preempted_by_starvation: IntArray
    num_generated: IntArray
    num_scheduled: IntArray
    num_computed: IntArray
    num_published: IntArray
    in_flight: IntArray
    slice_end: IntArray
    predicted_tokens: IntArray
    service_time_ns: IntArray
    last_scheduled_ns: IntArray
    first_token_ns: IntArray
    last_token_ns: IntArray
    largest_gap_ns: IntArray
    num_blocks: IntArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    mtpot_s: FloatArray
    e2e_s: FloatArray

    seq_id: IntArray
    """Increasing in the order of admission; -1 for waiting requests."""
    num_tokens_with_in_flight: IntArray
    """Known tokens, and those that plans in flight will sample."""
    prefilling: IntArray
    """1: known tokens are not all scheduled; 0: it decodes, or waits."""
    is_ending: IntArray
    """1: it ends at the update of the plan in flight."""
    postponed: IntArray
    """1: the executor cannot sample its next token yet (grammar); it is left out of plans until then."""

    def __init__(self, requests: Sequence[RequestState]) -> None:
        self.requests = list(requests)

    def __getattr__(self, name: str) -> Any:
        """A column, computed on first use."""
        if name not in _NAMES:
            raise AttributeError(name)
        column = self._column(name)
        setattr(self, name, column)
        return column

    def _column(self, name: str) -> npt.NDArray[Any]:
        """A column of waiting requests."""
        read = attrgetter(name)
        return np.array([read(request) for request in self.requests], dtype=_dtype(name))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Keys of the draws of output lengths."""
        return self.forecast_seed.view(np.uint64)

    @property
    def client_tokens(self) -> FloatArray:
        """What the clients of the requests have used; see ``Account.tokens``."""
        return np.array([request.account.tokens for request in self.requests])

    def take(self, rows: IntArray) -> "RequestTable":
        return _Selection(self, rows)

    def joined(self, other: "RequestTable") -> "RequestTable":
        """The rows of both tables."""
        return _Union(self, other)


class _Selection(RequestTable):
    """Some rows of a table."""

    def __init__(self, table: RequestTable, rows: IntArray) -> None:
        super().__init__([table.requests[row] for row in rows.tolist()])
        self._table, self._rows = table, rows

    def _column(self, name: str) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = getattr(self._table, name)[self._rows]
        return column


class _Union(RequestTable):
    """One table after another."""

    def __init__(self, first: RequestTable, second: RequestTable) -> None:
        super().__init__(first.requests + second.requests)
        self._first, self._second = first, second

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate((getattr(self._first, name), getattr(self._second, name)))


class RunningBatch(RequestTable):
    """The running requests of one service: one row each, in the order of admission.

    Only the scheduler changes it.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.on_inter_token_latency: Callable[[IntArray, int | IntArray], None] | None = None
        """Called with inter-token latencies in ns (0: first token) and the number of times that each
        occurred."""
        self.num_removals = 0
        """Row numbers are valid as long as it does not change."""
        self._table = np.zeros((len(_COLUMNS) + len(_GOALS), 64), dtype=np.int64)
        self._bind()

    def _bind(self) -> None:
        """Set the columns as attributes, after their length or memory has changed."""
        table = self._table[:, : len(self.requests)]
        self.__dict__.update(zip(_COLUMNS, table, strict=False))
        self.__dict__.update(zip(_GOALS, table[len(_COLUMNS) :].view(np.float64), strict=True))

    def add(self, request: RequestState) -> None:
        """Append a row for a request, which has its progress from now on; the request's fields have none."""
        row = len(self.requests)
        if row == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        self._table[: len(_COLUMNS), row] = _read(request)
        self._table[len(_COLUMNS) :, row] = np.array(_read_goals(request)).view(np.int64)
        self.requests.append(request)
        self._bind()
        self.prefilling[row] = 1
        for name in _PROGRESS:
            delattr(request, name)

    def remove(self, request: RequestState) -> None:
        """Remove a request's row, and write its progress to it. Rows behind it move up."""
        row = self.row_of(request)
        progress = self._table[_FIRST_PROGRESS:_END_PROGRESS, row].tolist()
        for name, value in zip(_PROGRESS, progress, strict=True):
            setattr(request, name, value)
        del self.requests[row]
        left = len(self.requests)
        if row < left:
            self._table[:, row:left] = self._table[:, row + 1 : left + 1]
        self.num_removals += 1
        self._bind()

    def row_of(self, request: RequestState) -> int:
        return int(self.seq_id.searchsorted(request.seq_id))

    def rows_of(self, seq_ids: IntArray) -> tuple[IntArray, BoolArray]:
        """Rows of some sequences, and a mask of those still running; the other rows mean nothing."""
        rows = self.seq_id.searchsorted(seq_ids)
        np.minimum(rows, len(self.requests) - 1, out=rows)
        return rows, self.seq_id[rows] == seq_ids if len(self.requests) else rows < -1

    def begin(self, rows: Rows, iterations: int) -> None:
        """The rows decode in a new plan, ``iterations`` tokens each."""
        self.num_tokens_with_in_flight[rows] += iterations
        self.num_scheduled[rows] += iterations
        self.in_flight[rows] += 1

    def advance(self, rows: Rows, tokens: int | IntArray, duration_ns: int, now_ns: int) -> None:
        """A plan of the rows has ended, in which each computed ``tokens`` tokens."""
        self.in_flight[rows] -= 1
        self.num_computed[rows] += tokens
        self.service_time_ns[rows] += duration_ns
        self.last_scheduled_ns[rows] = now_ns

    def uncount_tokens(self, rows: Rows, tokens: int | IntArray) -> None:
        """``tokens`` planned tokens of the rows were not sampled."""
        self.num_tokens_with_in_flight[rows] -= tokens
        self.num_scheduled[rows] -= tokens

    def postpone(self, rows: IntArray, *, computed: bool) -> None:
        """Leave the rows out of plans until the executor can sample for them.

        computed: their last token was counted as computed; it has to be computed again.
        """
        if computed:
            self.num_computed[rows] -= 1
            self.uncount_tokens(rows, 1)
        self.postponed[rows] = 1

    def rollback(self, rows: Rows, tokens: IntArray, sampled: IntArray) -> None:
        """Undo a failed plan, in which the rows were to compute ``tokens`` and sample ``sampled`` tokens.

        A row that misses a single token counts as a decode, even if it is the last token of its prompt.
        """
        self.in_flight[rows] -= 1
        self.num_scheduled[rows] -= tokens
        self.num_tokens_with_in_flight[rows] -= sampled
        missing = self.num_tokens_with_in_flight[rows] - self.num_scheduled[rows]
        self.prefilling[rows] = missing > 1

    def receive(self, rows: Rows, tokens: int | IntArray, ends_ns: Sequence[int]) -> None:
        """Add ``tokens`` output tokens to the rows.

        ends_ns: end times of the plan's iterations.
        """
        first_ns = ends_ns[0]
        gaps_ns = first_ns - self.last_token_ns[rows]
        generated = self.num_generated[rows]
        if np.count_nonzero(generated) < len(generated):
            new = generated == 0
            first_token_ns = self.first_token_ns[rows]
            first_token_ns[new] = first_ns
            self.first_token_ns[rows] = first_token_ns
            gaps_ns[new] = 0
        if self.on_inter_token_latency is not None:
            self._report_inter_token_latency(self.on_inter_token_latency, gaps_ns, tokens, ends_ns)
        last_ns: int | IntArray = ends_ns[-1]
        if len(ends_ns) > 1:
            longest_ns = list(accumulate(map(sub, ends_ns, (first_ns, *ends_ns)), max))
            if isinstance(tokens, int):
                last = min(tokens, len(ends_ns)) - 1
                np.maximum(gaps_ns, longest_ns[last], out=gaps_ns)
                last_ns = ends_ns[last]
            else:
                # A row with fewer tokens ended before the last iterations.
                lasts = np.minimum(tokens, len(ends_ns)) - 1
                np.maximum(gaps_ns, np.array(longest_ns)[lasts], out=gaps_ns)
                last_ns = np.array(ends_ns)[lasts]
        self.num_generated[rows] += tokens
        self.postponed[rows] = 0
        self.largest_gap_ns[rows] = np.maximum(self.largest_gap_ns[rows], gaps_ns)
        self.last_token_ns[rows] = last_ns

    def _report_inter_token_latency(
        self,
        report: Callable[[IntArray, int | IntArray], None],
        gaps_ns: IntArray,
        tokens: int | IntArray,
        ends_ns: Sequence[int],
    ) -> None:
        """Report the gap before each row's first token in a plan, then those between its iterations."""
        report(gaps_ns.copy(), 1)
        if len(ends_ns) > 1:
            times_ns = np.array(ends_ns)
            between_ns = times_ns[1:] - times_ns[:-1]
            if isinstance(tokens, int):
                report(between_ns[: tokens - 1], len(gaps_ns))
            else:
                report(between_ns, (tokens[:, None] > np.arange(1, len(ends_ns))).sum(axis=0))

    def grow(self, row: int, blocks: Sequence[int]) -> None:
        """Append blocks to the block table of a request."""
        self.requests[row].block_ids += blocks
        self.num_blocks[row] += len(blocks)


def _dtype(name: str) -> type:
    return np.float64 if name in _GOALS else np.int64
