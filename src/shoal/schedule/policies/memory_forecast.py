"""Forecast of a service's KV memory, now and in the future, for assumed output lengths of its requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from shoal.forecast import Demand, LengthDistribution, SharedBlocks, Timeline, blocks_in
from shoal.kvcache import ServiceLayout
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True)
class MemoryForecast:
    """Requests of one service, and how their memory is counted. Created for each decision."""

    layout: ServiceLayout
    block_size: int
    """Tokens per block."""
    table: RequestTable
    """The requests that hold memory."""
    shared: SharedBlocks | None
    """Blocks shared among them."""
    past: Callable[[], LengthDistribution]
    """Computes the distribution of output lengths, which not all admissions need."""

    @cached_property
    def lengths(self) -> LengthDistribution:
        return self.past()

    def __len__(self) -> int:
        return len(self.table)

    def plus(self, candidates: RequestTable, shared: SharedBlocks | None) -> "MemoryForecast":
        """The forecast with further requests; shared: blocks shared among all of them."""
        return replace(self, table=self.table.joined(candidates), shared=shared, past=lambda: self.lengths)

    def only(self, rows: IntArray, shared: SharedBlocks | None) -> "MemoryForecast":
        """The forecast of some of the requests; shared: blocks shared among these."""
        return replace(self, table=self.table.take(rows), shared=shared, past=lambda: self.lengths)

    def merged(self, blocks: int) -> int:
        """Merged blocks (split: units) occupied by ``blocks`` blocks."""
        return -(-blocks // self.layout.blocks_per_merged) * self.layout.units_per_block

    @cached_property
    def demand(self) -> Demand:
        """Growth of memory with tokens."""
        return Demand(
            tokens=self.table.num_tokens_with_in_flight,
            block_size=self.block_size,
            blocks_per_merged=self.layout.blocks_per_merged,
            units_per_block=self.layout.units_per_block,
            shared=self.shared,
        )

    def blocks_of(self, tokens: IntArray) -> int:
        """Total blocks if the requests have ``tokens`` tokens [n]."""
        surplus = 0 if self.shared is None else self.shared.surplus
        return int(self._own_blocks(tokens).sum()) - surplus

    def with_each(self, tokens: IntArray, candidate_tokens: IntArray) -> IntArray:
        """Merged blocks for ``tokens`` [n], with the first, the first two, ... candidates' tokens [k]."""
        blocks = self.blocks_of(tokens)
        further = accumulate(self._own_blocks(candidate_tokens).tolist())
        return np.array([self.merged(blocks + count) for count in further])

    def _own_blocks(self, tokens: IntArray) -> IntArray:
        """Blocks of each request, ignoring sharing."""
        return blocks_in(tokens + (self.block_size - 1), self.block_size)

    @property
    def footprint(self) -> int:
        """Merged blocks for all known tokens."""
        return self.merged(self.blocks_of(self.table.num_tokens_with_in_flight))

    @property
    def max_footprint(self) -> int:
        """Merged blocks if every output has its maximum length and all requests end together."""
        return self.merged(self.blocks_of(max_stored_tokens(self.table)))

    def timeline(self, lengths: IntArray) -> Timeline:
        """Ends of requests and the memory at these times, for output lengths [draws, n]."""
        return self.demand.timeline(remaining(self.table, lengths))


def remaining(table: RequestTable, lengths: IntArray) -> IntArray:
    """Tokens still to be stored, for output lengths [draws, n].

    The last token of an output is never computed, so a request ends with prompt + output - 1 tokens of KV.
    """
    stored = table.num_tokens_with_in_flight - table.num_prompt_tokens + 1
    left: IntArray = lengths - stored
    np.maximum(left, 0, out=left)
    return left


def max_stored_tokens(table: RequestTable) -> IntArray:
    """Tokens stored at the end of outputs of maximum length [n]."""
    longest: IntArray = table.num_prompt_tokens + table.max_new_tokens - 1
    return np.maximum(longest, table.num_tokens_with_in_flight, out=longest)


def peaks_with_each(forecast: MemoryForecast, candidates: RequestTable, lengths: IntArray) -> IntArray:
    """M* in merged blocks with the first, the first two, ... of ``candidates``, without sharing [k, draws].

    lengths: output lengths of the n requests that hold memory, then of the candidates [draws, n + k].
    """
    count = len(forecast)
    timeline = forecast.timeline(lengths[:, :count])
    return timeline.peak_with_each(
        candidates.num_tokens_with_in_flight, remaining(candidates, lengths[:, count:])
    )


def total_peaks(forecasts: Sequence[MemoryForecast], lengths: Sequence[IntArray]) -> IntArray:
    """The sum of every service's M* in merged blocks [draws], for output lengths [draws, n] of each."""
    peaks = [forecast.timeline(some).peak() for forecast, some in zip(forecasts, lengths, strict=True)]
    total: IntArray = np.sum(peaks, axis=0, dtype=np.int64)
    return total
