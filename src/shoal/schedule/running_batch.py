"""The requests of one service as columns of numbers; of those that run, the only record of their progress."""

from collections.abc import Sequence
from operator import attrgetter, sub
from typing import Self

import numpy as np
import numpy.typing as npt

from shoal.schedule.request_state import RequestState

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Rows = IntArray | slice
"""Some rows of a table; ``ALL`` for every one."""

ALL = slice(None)

# What stays the same of a running request, then what steps change.
_FIXED = (
    "seq_id",
    "number",
    "num_prompt_tokens",
    "max_new_tokens",
    "num_final_tokens",
    "forecast_seed",
    "arrival_ns",
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
_DERIVED = ("num_tokens_with_in_flight", "num_blocks")
_SET_HERE = ("prefilling", "ending")
_COLUMNS = _FIXED + _PROGRESS + _DERIVED + _SET_HERE
_GOALS = ("ttft_s", "tpot_s", "e2e_s")
_FIRST_PROGRESS, _END_PROGRESS = len(_FIXED), len(_FIXED) + len(_PROGRESS)
_read = attrgetter(
    *("request.arrival_ns" if name == "arrival_ns" else name for name in _FIXED + _PROGRESS + _DERIVED)
)


class RequestTable:
    """Some requests, and their numbers as arrays [n]: what policies compute with.

    There is no phase: a step computes some of the tokens that are missing, one of a request that decodes and
    several of one within its prompt.

        |<- computed ->|<- in flight ->|<-    missing    ->|
        0       num_computed    num_scheduled    num_tokens_with_in_flight

    Arrays are views, valid until the table changes.
    """

    requests: list[RequestState]
    """Whose numbers these are."""
    seq_id: IntArray
    """Numbers in the order of admission; -1 for requests that wait."""
    number: IntArray
    """Places in the order of submission."""
    num_prompt_tokens: IntArray
    """Prompt tokens."""
    max_new_tokens: IntArray
    """Most output tokens."""
    num_final_tokens: IntArray
    """Tokens at the end, where known beforehand, else the most; not for policies, but for the oracle."""
    forecast_seed: IntArray
    """Keys of the draws of their lengths; 64 bits, see ``seeds``."""
    arrival_ns: IntArray
    """When they arrived."""
    num_preempted_by_starvation: IntArray
    """How often they lost their blocks to a starved request."""
    num_generated: IntArray
    """Output tokens known."""
    num_scheduled: IntArray
    """Tokens given to some plan."""
    num_computed: IntArray
    """Tokens whose KV is in place."""
    num_published: IntArray
    """Leading blocks that were offered to the prefix index."""
    in_flight: IntArray
    """Plans in flight that they are part of."""
    slice_end: IntArray
    """Number of tokens at which the next slice is needed; the final number where there are no slices."""
    predicted_tokens: IntArray
    """Predicted output tokens."""
    service_time_ns: IntArray
    """Durations of the steps they took part in."""
    last_scheduled_ns: IntArray
    """When they last took part in a step; before the first, when they were submitted."""
    first_token_ns: IntArray
    """When the first output token was known; 0: not yet."""
    last_token_ns: IntArray
    """When the newest output token was known."""
    largest_gap_ns: IntArray
    """Longest time between two output tokens."""
    num_tokens_with_in_flight: IntArray
    """Tokens known, and those that plans in flight will sample."""
    num_blocks: IntArray
    """Lengths of the block tables."""
    prefilling: IntArray
    """1: known tokens are not all scheduled; 0: it decodes."""
    ending: IntArray
    """1: it ends at the update of the plan in flight."""
    ttft_s: FloatArray
    """Goals for the first token; NaN where there is none."""
    tpot_s: FloatArray
    """Goals for each further token; NaN where there is none."""
    e2e_s: FloatArray
    """Goals for the whole request; NaN where there is none."""

    def __init__(self, requests: Sequence[RequestState] = ()) -> None:
        self.requests = list(requests)
        size = max(64, len(requests) + 1)
        self._table = np.zeros((len(_COLUMNS), size), dtype=np.int64)
        self._goals = np.zeros((len(_GOALS), size))
        for row, request in enumerate(requests):
            self._write(row, request)
        self._bind()

    @classmethod
    def _from(cls, requests: list[RequestState], table: IntArray, goals: FloatArray) -> Self:
        made = object.__new__(cls)
        made.requests, made._table, made._goals = requests, table, goals
        made._bind()
        return made

    def _write(self, row: int, request: RequestState) -> None:
        self._table[:, row] = (*_read(request), 1, request.ending is not None)
        self._goals[:, row] = request.goals_s

    def _bind(self) -> None:
        count = len(self.requests)
        self.__dict__.update(zip(_COLUMNS, self._table[:, :count], strict=True))
        self.__dict__.update(zip(_GOALS, self._goals[:, :count], strict=True))

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Keys of the draws of their lengths."""
        return self.forecast_seed.view(np.uint64)

    def take(self, rows: IntArray) -> "RequestTable":
        """Some of them."""
        requests = [self.requests[row] for row in rows.tolist()]
        return RequestTable._from(requests, self._table[:, rows], self._goals[:, rows])

    def joined(self, other: "RequestTable") -> "RequestTable":
        """These and those of another table."""
        mine, theirs = len(self), len(other)
        table = np.concatenate((self._table[:, :mine], other._table[:, :theirs]), axis=1)
        goals = np.concatenate((self._goals[:, :mine], other._goals[:, :theirs]), axis=1)
        return RequestTable._from(self.requests + other.requests, table, goals)

    def with_candidate(self, request: RequestState) -> "RequestTable":
        """These and one more, who waits, at the end; valid until the next change."""
        self._reserve()
        self._write(len(self.requests), request)
        return RequestTable._from([*self.requests, request], self._table, self._goals)

    def _reserve(self) -> None:
        if len(self.requests) == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self._goals = np.concatenate((self._goals, np.zeros_like(self._goals)), axis=1)
            self._bind()


class RunningBatch(RequestTable):
    """The running requests of one service: one row each, in the order of admission.

    Only the scheduler changes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_removals = 0
        """How many requests have been removed: while it stays the same, so do row numbers."""

    def add(self, request: RequestState) -> None:
        """A request runs from now on; its row is the last."""
        self._reserve()
        self._write(len(self.requests), request)
        self.requests.append(request)
        self._bind()

    def remove(self, request: RequestState) -> None:
        """A request runs no longer: its progress is written to it. Rows behind it move up."""
        row = self.row_of(request)
        progress = self._table[_FIRST_PROGRESS:_END_PROGRESS, row].tolist()
        for name, value in zip(_PROGRESS, progress, strict=True):
            setattr(request, name, value)
        del self.requests[row]
        left = len(self.requests)
        if row < left:
            self._table[:, row:left] = self._table[:, row + 1 : left + 1]
            self._goals[:, row:left] = self._goals[:, row + 1 : left + 1]
        self.num_removals += 1
        self._bind()

    def row_of(self, request: RequestState) -> int:
        """The row of a running request."""
        return int(self.seq_id.searchsorted(request.seq_id))

    def rows_of(self, seq_ids: IntArray) -> tuple[IntArray, BoolArray]:
        """Rows of some sequences, and which of them still run; the rows of others mean nothing."""
        rows = self.seq_id.searchsorted(seq_ids)
        np.minimum(rows, len(self.requests) - 1, out=rows)
        return rows, self.seq_id[rows] == seq_ids if len(self.requests) else rows < -1

    def begin(self, rows: Rows, iterations: int) -> None:
        """These decode in a plan, which gives each so many tokens."""
        self.num_tokens_with_in_flight[rows] += iterations
        self.num_scheduled[rows] += iterations
        self.in_flight[rows] += 1

    def advance(self, rows: Rows, tokens: int | IntArray, duration_ns: int, now_ns: int) -> None:
        """A plan of these ended now, in which each computed so many tokens."""
        self.in_flight[rows] -= 1
        self.num_computed[rows] += tokens
        self.service_time_ns[rows] += duration_ns
        self.last_scheduled_ns[rows] = now_ns

    def withdraw(self, rows: Rows, tokens: int | IntArray) -> None:
        """So many tokens of a plan that ended were not made."""
        self.num_tokens_with_in_flight[rows] -= tokens
        self.num_scheduled[rows] -= tokens

    def receive(self, rows: Rows, tokens: int | IntArray, ends_ns: Sequence[int]) -> None:
        """Each of these got so many output tokens.

        ends_ns: when the iterations ended that made them.
        """
        first_ns = ends_ns[0]
        gaps_ns = first_ns - self.last_token_ns[rows]
        new = self.num_generated[rows] == 0
        if np.count_nonzero(new):
            self.first_token_ns[rows] = np.where(new, first_ns, self.first_token_ns[rows])
            gaps_ns[new] = 0
        if len(ends_ns) > 1:
            np.maximum(gaps_ns, max(map(sub, ends_ns[1:], ends_ns)), out=gaps_ns)
        self.num_generated[rows] += tokens
        self.largest_gap_ns[rows] = np.maximum(self.largest_gap_ns[rows], gaps_ns)
        self.last_token_ns[rows] = ends_ns[-1]

    def grow(self, row: int, blocks: Sequence[int]) -> None:
        """A request's block table gets further blocks."""
        self.requests[row].block_ids += blocks
        self.num_blocks[row] += len(blocks)
