"""The memory that one service's requests hold and will hold, by what is assumed of their output lengths."""

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
    """Requests of one service, and how their memory is counted. Computed anew for every question."""

    layout: ServiceLayout
    """The service's part of the pool."""
    block_size: int
    """Tokens in a block."""
    table: RequestTable
    """The requests that hold memory."""
    shared: SharedBlocks | None
    """Blocks that several of them hold."""
    past: Callable[[], LengthDistribution]
    """What the service's past says about output lengths; not all admissions ask."""

    @cached_property
    def lengths(self) -> LengthDistribution:
        """The same."""
        return self.past()

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.table)

    def plus(self, candidates: RequestTable, shared: SharedBlocks | None) -> "MemoryForecast":
        """These and some candidates, with the blocks that several of all of them hold."""
        return replace(self, table=self.table.joined(candidates), shared=shared, past=lambda: self.lengths)

    def only(self, rows: IntArray, shared: SharedBlocks | None) -> "MemoryForecast":
        """Some of them, with the blocks that several of those hold."""
        return replace(self, table=self.table.take(rows), shared=shared, past=lambda: self.lengths)

    def merged(self, blocks: int) -> int:
        """Merged blocks that so many blocks take."""
        return -(-blocks // self.layout.blocks_per_merged) * self.layout.units_per_block

    @cached_property
    def demand(self) -> Demand:
        """How their memory grows with their tokens."""
        return Demand(
            tokens=self.table.num_tokens_with_in_flight,
            block_size=self.block_size,
            blocks_per_merged=self.layout.blocks_per_merged,
            units_per_block=self.layout.units_per_block,
            shared=self.shared,
        )

    def blocks_of(self, tokens: IntArray) -> int:
        """Blocks in all if each has so many tokens."""
        surplus = 0 if self.shared is None else self.shared.surplus
        return int(self._own_blocks(tokens).sum()) - surplus

    def with_each(self, tokens: IntArray, candidate_tokens: IntArray) -> IntArray:
        """Merged blocks if each has so many tokens, with the first, the first two, ... candidates [k]."""
        blocks = self.blocks_of(tokens)
        further = accumulate(self._own_blocks(candidate_tokens).tolist())
        return np.array([self.merged(blocks + count) for count in further])

    def _own_blocks(self, tokens: IntArray) -> IntArray:
        """Blocks of each, as if none shared any."""
        return blocks_in(tokens + (self.block_size - 1), self.block_size)

    @property
    def footprint(self) -> int:
        """Merged blocks for all known tokens."""
        return self.merged(self.blocks_of(self.table.num_tokens_with_in_flight))

    @property
    def most(self) -> int:
        """Merged blocks if every output is as long as it may be, and none leaves before another."""
        return self.merged(self.blocks_of(most_tokens(self.table)))

    def timeline(self, lengths: IntArray) -> Timeline:
        """When they end and what is held then, if outputs have such lengths [draws, n]."""
        return self.demand.timeline(remaining(self.table, lengths))


def remaining(table: RequestTable, lengths: IntArray) -> IntArray:
    """Tokens still to be stored, for output lengths [draws, n].

    One less than will be generated: the last token of an output is never computed, so that a request ends
    with prompt + output - 1 tokens of KV.
    """
    stored = table.num_tokens_with_in_flight - table.num_prompt_tokens + 1
    left: IntArray = lengths - stored
    np.maximum(left, 0, out=left)
    return left


def most_tokens(table: RequestTable) -> IntArray:
    """Tokens stored at the end of outputs as long as they may be [n]."""
    longest: IntArray = table.num_prompt_tokens + table.max_new_tokens - 1
    return np.maximum(longest, table.num_tokens_with_in_flight, out=longest)


def peaks_with_each(forecast: MemoryForecast, candidates: RequestTable, lengths: IntArray) -> IntArray:
    """M* in merged blocks with the first, the first two, ... of ``candidates``, who share none [k, draws].

    lengths: output lengths of the n that hold memory, then of candidates [draws, n + k].
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
