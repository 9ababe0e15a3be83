"""The books of the requests themselves: who waits, who runs, who holds which blocks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from shoal.core import NO_GOALS, BlockCopy, FinishReason, RequestRecord, TokenEvent, TokenLogprobs
from shoal.core.slo import met
from shoal.kvcache import BlockPool, Move
from shoal.schedule.group import Group
from shoal.schedule.orders import Order
from shoal.schedule.stats import Counters, SchedulerStats, ServiceStats
from shoal.schedule.tracked import Tracked

OnEnd = Callable[[Tracked, FinishReason, int], None]
"""Told of every request that ends, why, and when; not to look at others, whose books are being written."""


class Ledger:
    """Moves requests between waiting, running and ended, and blocks between their tables and the pools.

    host: the pool of swapped KV in host memory; without one an evicted request is computed again.
    requests: unfinished ones by id. left, vacate, moved: what the next plan tells the executor (sequences to
    drop, copies out of blocks given up, tables after a compaction). admissions: how often a request was
    admitted; also the next sequence number. ends: how many requests have ended.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Mapping[str, Group],
        order: Order,
        host: BlockPool | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self.groups = groups
        self.requests: dict[str, Tracked] = {}
        self.left: list[int] = []
        self.vacate: list[BlockCopy] = []
        self.moved: dict[int, tuple[int, ...]] = {}
        self.admissions = 0
        self.ends = 0
        self._pool = pool
        self._host = host
        self._order = order
        self._on_end = on_end
        self._counters = {name: Counters() for name in groups}

    def add(self, one: Tracked, now_ns: int) -> None:
        """A new request waits."""
        group = self.groups[one.service]
        self.requests[one.request.id] = one
        group.beliefs.monitor.arrived(now_ns)
        one.served_ns = now_ns
        self._await(one, group)

    def _await(self, one: Tracked, group: Group) -> None:
        one.rank = self._order.rank(one, group)
        group.waiting.add(one)

    def enter(self, one: Tracked) -> None:
        """A waiting request whose table has been filled runs."""
        group = self.groups[one.service]
        one.sequence = self.admissions
        self.admissions += 1
        group.enter(one)
        counters = self._counters[one.service]
        if not one.admitted:
            one.admitted = True
            one.cached_tokens = one.computed
            counters.prompt_tokens += one.prompt_tokens
            counters.cached_tokens += one.computed
        if one.lost:
            again = max(0, one.lost - one.computed)
            counters.recomputed_tokens += again
            one.recomputed += again
            one.lost = 0

    def evict(self, one: Tracked) -> None:
        """A running request that is part of no plan in flight gives up its blocks, and waits with its tokens.

        Its KV is saved on the host where there is room, otherwise dropped.
        """
        self.groups[one.service].cohort.settle()
        one.evictions += 1
        one.lost = one.computed
        counters = self._counters[one.service]
        counters.evictions += 1
        if self._save(one):
            counters.swapped_tokens += one.computed
        self._leave(one)
        self.release(one)
        one.scheduled = one.computed = one.published = 0
        one.blocked_until = self.ends + 1
        self._await(one, self.groups[one.service])

    def _save(self, one: Tracked) -> bool:
        if self._host is None or not one.computed:
            return False
        blocks = self._host.allocate(one.service, -(-one.computed // self._host.block_size))
        if blocks is None:
            return False
        self.vacate += [
            BlockCopy(one.service, source, target, target_host=True)
            for source, target in zip(one.blocks, blocks, strict=False)
        ]
        one.saved, one.saved_tokens = blocks, one.computed
        return True

    def forget_saved(self, one: Tracked) -> list[int]:
        """The host blocks of a request that has its KV back, for the caller to free when they are copied."""
        saved, one.saved, one.saved_tokens = one.saved, [], 0
        return saved

    def free_saved(self, service: str, blocks: Sequence[int]) -> None:
        """Give up host blocks."""
        if blocks and self._host is not None:
            self._host.free(service, blocks)

    def _drop_saved(self, one: Tracked) -> None:
        """Nobody will want its saved KV; what was still to be saved need not be."""
        if one.saved:
            self.vacate = [
                copy
                for copy in self.vacate
                if not (copy.target_host and copy.service == one.service and copy.target in one.saved)
            ]
            self.free_saved(one.service, self.forget_saved(one))

    def compacted(self, moves: Sequence[Move]) -> None:
        """The pool moved blocks: tables follow, and the next plan carries it out."""
        renamed: dict[str, dict[int, int]] = defaultdict(dict)
        for move in moves:
            self.vacate.append(BlockCopy(move.service, move.source, move.target))
            renamed[move.service][move.source] = move.target
        for service, moved in renamed.items():
            for one in self.groups[service].rename(moved):
                assert one.sequence is not None
                self.moved[one.sequence] = tuple(one.blocks)
            self._counters[service].compacted_blocks += len(moved)

    def delivered(self, service: str, tokens: int) -> None:
        """Count so many more output tokens."""
        self._counters[service].output_tokens += tokens

    def publish(self, one: Tracked) -> None:
        """Offer blocks that have become full and computed to the prefix index.

        A block whose hash another block has already stays private, and those behind it do not count as
        shareable: what others find there hangs on the other block.
        """
        full = one.computed // self._pool.block_size
        if full <= one.published:
            return
        one.hash_known(self._pool.block_size, full)
        until = min(full, len(one.hashes))
        blocks = one.blocks[one.published : until]
        found = self._pool.publish(one.service, blocks, one.hashes[one.published : until])
        if one.shareable == one.published:
            one.shareable += found
            self.groups[one.service].shared.hold(blocks[:found])
        one.published = until

    def end(
        self,
        one: Tracked,
        reason: FinishReason,
        now_ns: int,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """The request is over, with this last event; its blocks go once no plan in flight uses them."""
        group = self.groups[one.service]
        one.ended = True
        self.ends += 1
        if one.sequence is None:
            group.waiting.remove(one)
        else:
            self._leave(one)
        if not one.in_flight:
            self.release(one)
        self._drop_saved(one)
        del self.requests[one.request.id]
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._counters[one.service].cancelled += 1
        else:
            self._counters[one.service].finished += 1
            if one.generated:
                self._learn(one, group, now_ns)
        if self._on_end is not None:
            self._on_end(one, reason, now_ns)
        return TokenEvent(
            one.request.id,
            tokens,
            logprobs,
            reason,
            stop_token,
            error,
            cached_tokens=one.cached_tokens,
        )

    def _learn(self, one: Tracked, group: Group, now_ns: int) -> None:
        """A request that finished is what beliefs are made of."""
        group.history.record(one.generated)
        group.beliefs.predictor.record(one.request, one.generated)
        group.beliefs.monitor.finished(
            now_ns,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.generated,
            execution_ns=one.charged_ns,
            arrival_ns=one.request.arrival_ns,
            first_token_ns=one.first_token_ns,
            met=None if one.slo is NO_GOALS else met(_record(one, now_ns), one.slo),
        )

    def _leave(self, one: Tracked) -> None:
        """A running request runs no longer; its blocks are released apart."""
        group = self.groups[one.service]
        assert one.sequence is not None
        self.left.append(one.sequence)
        self.moved.pop(one.sequence, None)
        one.sequence = None
        group.leave(one)
        group.shared.drop(one.blocks[: one.shareable])
        one.shareable = 0
        group.changed(members=True)

    def release(self, one: Tracked) -> None:
        """Give up its references on its blocks."""
        self._pool.free(one.service, one.blocks)
        one.blocks = []

    def stats(self, steps: int) -> SchedulerStats:
        """Counts so far."""
        services = {
            name: ServiceStats(
                waiting=len(group.waiting),
                running=len(group.running),
                unfilled_tokens=sum(
                    len(one.blocks) * self._pool.block_size - one.scheduled for one in group.running
                ),
                swapped=sum(1 for one in group.waiting if one.saved) if self._host is not None else 0,
                **asdict(self._counters[name]),
            )
            for name, group in self.groups.items()
        }
        return SchedulerStats(services, steps)


def _record(one: Tracked, now_ns: int) -> RequestRecord:
    return RequestRecord(
        request_id=one.request.id,
        service=one.service,
        arrival_ns=one.request.arrival_ns,
        first_token_ns=one.first_token_ns,
        finish_ns=now_ns,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.generated,
    )
