"""The books of the requests themselves: who waits, who runs, who holds which blocks."""

from collections.abc import Mapping
from dataclasses import asdict

from shoal.core import FinishReason, TokenEvent, TokenLogprobs
from shoal.kvcache import BlockPool
from shoal.schedule.group import Group
from shoal.schedule.stats import Counters, SchedulerStats, ServiceStats
from shoal.schedule.tracked import Tracked


class Ledger:
    """Moves requests between waiting, running and ended, and blocks between their tables and the pool.

    requests: unfinished ones by id. left: sequence numbers that the next plan tells the executor to drop.
    admissions: how often a request was admitted; also the next sequence number.
    """

    def __init__(self, pool: BlockPool, groups: Mapping[str, Group]) -> None:
        self.groups = groups
        self.requests: dict[str, Tracked] = {}
        self.left: list[int] = []
        self.admissions = 0
        self._pool = pool
        self._counters = {name: Counters() for name in groups}

    def add(self, one: Tracked) -> None:
        """A new request waits."""
        self.requests[one.request.id] = one
        self.groups[one.service].waiting.append(one)

    def enter(self, one: Tracked) -> None:
        """A waiting request whose table has been filled runs."""
        group = self.groups[one.service]
        one.sequence = self.admissions
        self.admissions += 1
        one.refused_at = None
        if group.waiting[0] is one:
            group.waiting.popleft()
        else:
            group.waiting.remove(one)
        group.running.append(one)
        group.prefills.append(one)
        counters = self._counters[one.service]
        if not one.admitted:
            one.admitted = True
            one.cached_tokens = one.computed
            counters.prompt_tokens += one.prompt_tokens
            counters.cached_tokens += one.computed
        counters.recomputed_tokens += max(0, one.lost - one.computed)
        one.lost = 0

    def evict(self, one: Tracked) -> None:
        """A running request that is part of no plan in flight loses its KV, and waits with its tokens."""
        one.evictions += 1
        one.lost = one.computed
        self._counters[one.service].evictions += 1
        self._leave(one)
        self.release(one)
        one.scheduled = one.computed = one.published = 0
        self.groups[one.service].put_back(one)

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
        for at in range(one.published, until):
            block = one.blocks[at]
            self._pool.publish(one.service, block, one.hashes[at])
            if one.shareable == at and self._pool.is_shared(one.service, block):
                one.shareable += 1
                self.groups[one.service].shared.hold((block,))
        one.published = until

    def end(
        self,
        one: Tracked,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """The request is over, with this last event; its blocks go once no plan in flight uses them."""
        group = self.groups[one.service]
        one.ended = True
        if one.sequence is None:
            group.waiting.remove(one)
        else:
            self._leave(one)
        if not one.in_flight:
            self.release(one)
        del self.requests[one.request.id]
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._counters[one.service].cancelled += 1
        else:
            self._counters[one.service].finished += 1
            group.history.record(one.generated)
        return TokenEvent(
            one.request.id,
            tokens,
            logprobs,
            reason,
            stop_token,
            error,
            cached_tokens=one.cached_tokens,
        )

    def _leave(self, one: Tracked) -> None:
        """A running request runs no longer; its blocks are released apart."""
        group = self.groups[one.service]
        assert one.sequence is not None
        self.left.append(one.sequence)
        one.sequence = None
        group.running.remove(one)
        if one in group.prefills:
            group.prefills.remove(one)
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
                **asdict(self._counters[name]),
            )
            for name, group in self.groups.items()
        }
        return SchedulerStats(services, steps)
