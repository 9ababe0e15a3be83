"""Letting waiting requests in: what the prefix index has of them, and whether the rest fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import BlockCopy, Joined, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.admission import Admission
from shoal.schedule.crowd import Crowd
from shoal.schedule.group import Group
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A waiting request that joins the next plan; its blocks are allocated.

    chunk: tokens it computes there. copy: copy-on-write of its last block, where every known token was
    found; ``copy.source`` stays referenced until the plan's update.
    """

    request: Tracked
    chunk: int
    copy: BlockCopy | None

    def joined(self) -> Joined:
        """The delta for the executor; a synthetic prompt has no ids, so counting numbers stand for them."""
        one = self.request
        assert one.sequence is not None
        synthetic = isinstance(one.request.prompt, SyntheticPrompt)
        return Joined(
            sequence=one.sequence,
            tokens=range(one.known) if synthetic else tuple(one.tokens),
            prompt_tokens=one.prompt_tokens,
            computed=one.computed,
            blocks=tuple(one.blocks),
            sampling=one.request.sampling,
            seed=one.request.seed,
        )


class Door:
    """Admits requests of one service to one plan, one after another.

    others: the groups of the other services. claimed: blocks that the service's running requests need in the
    same plan; a newcomer takes none of those, and evicts nobody.
    """

    def __init__(
        self, pool: BlockPool, admission: Admission, group: Group, others: Sequence[Group], claimed: int
    ) -> None:
        self.joined: list[Newcomer] = []
        self._pool = pool
        self._admission = admission
        self._group = group
        self._others = others
        self._claimed = claimed
        # Nobody looks at what requests hold before there are blocks for the first of those who wait.
        self._crowd: Crowd | None = None

    def admit(self, one: Tracked, budget: int, *, always: bool) -> int:
        """Let ``one`` in if memory allows; returns how many of ``budget`` tokens it computes, 0 if refused.

        always: whatever the admission says. All known tokens must find room at once, also where the budget
        makes this plan compute a part of them, so that half a prompt is not let in to be evicted.
        """
        pool, service, size = self._pool, one.service, self._pool.block_size
        hits = self._find(one)
        # One token must be left to compute. If all blocks were found, a copy of the last is written again.
        rewrite = len(hits) * size == one.known
        kept = hits[:-1] if rewrite else hits
        needed = -(-one.known // size) - len(kept)
        if not pool.can_allocate(service, self._claimed + needed):
            pool.free(service, hits)
            return 0
        crowd = self._crowd_with(one, kept)
        if not always and not self._admission.fits(
            [crowd, *(other.crowd() for other in self._others)], pool.capacity
        ):
            pool.free(service, hits)
            return 0
        self._crowd = crowd
        one.computed = one.scheduled = one.known - 1 if rewrite else len(hits) * size
        chunk = min(budget, one.known - one.computed)
        fresh = pool.allocate(service, -(-(one.computed + chunk) // size) - len(kept))
        assert fresh is not None
        one.blocks = kept + fresh
        one.published, one.shareable = len(hits), len(kept)
        self._group.shared.hold(kept)
        copy = BlockCopy(service, hits[-1], fresh[0]) if rewrite else None
        self.joined.append(Newcomer(one, chunk, copy))
        return chunk

    def _find(self, one: Tracked) -> list[int]:
        """Blocks of its leading tokens that are at hand, now with a reference each."""
        if not self._pool.prefix_caching:
            return []
        one.hash_known(self._pool.block_size, one.known // self._pool.block_size)
        return self._pool.match_prefix(one.service, one.hashes)

    def _crowd_with(self, one: Tracked, kept: Sequence[int]) -> Crowd:
        """Those running, those let in so far, and ``one`` beginning with the blocks ``kept``."""
        crowd = self._group.crowd() if self._crowd is None else self._crowd
        return self._group.crowd_with(crowd, [other.request for other in self.joined], one, kept)
