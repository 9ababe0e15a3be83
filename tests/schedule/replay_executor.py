"""An executor with a fake memory that asserts everything that a real executor relies on."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.core import NO_TOKEN, BlockCopy, StepPlan, StepResult, derive_seed
from shoal.kvcache import BlockPool

STEP_NS = 1_000
"""Duration of an iteration."""


@dataclass
class _Sequence:
    service: str
    tokens: list[int]
    computed: int
    table: list[int]
    joined_tokens: int
    """Number of tokens known when it joined."""
    seed: int


class ReplayExecutor:
    """Executes plans, and keeps the batch that they describe.

    A slot of KV holds a digest of all tokens up to its own; before a sequence computes tokens, the digests of
    all earlier ones must lie in its blocks. The token sampled is a function of the digest alone, so
    output depends on the prompt and on nothing else.

    vocabulary: how many tokens there are; None: as many as it takes that no two requests, whose seeds
    differ, have one in common. stops: of several iterations it makes no further one after one of these
    tokens was sampled. postpones: whether the next token of a sequence cannot be sampled yet.
    """

    def __init__(
        self,
        pool: BlockPool,
        vocabulary: int | None = 10_000,
        stops: Sequence[int] = (),
        postpones: Callable[[int], bool] = lambda seq_id: False,
    ) -> None:
        self.pool = pool
        self.postpones = postpones
        self.vocabulary = vocabulary
        self.stops = frozenset(stops)
        self.sequences: dict[int, _Sequence] = {}
        self.computed_tokens = 0
        self.seen: set[int] = set()
        self.memory: dict[tuple[str, int], list[int]] = {}
        self.host: dict[tuple[str, int], list[int]] = {}
        self.copied = Counter[str]()
        self.owner: dict[int, str] = {}
        self.users: Counter[tuple[str, int]] = Counter()

    def run(self, plan: StepPlan, iterations: int | None = None) -> StepResult:
        """Execute a plan, or only ``iterations`` of it."""
        self._apply(plan)
        made = [self._compute(plan, plan.new_tokens)]
        for _ in range(1, plan.iterations if iterations is None else iterations):
            if not self.stops.isdisjoint(made[-1]) or NO_TOKEN in made[-1]:
                break
            made.append(self._compute(plan, (1,) * len(plan.seq_ids)))
        postponed = frozenset(place for place, token in enumerate(made[-1]) if token == NO_TOKEN)
        return StepResult(made, [STEP_NS] * len(made), postponed=postponed)

    def run_at_once(self, plan: StepPlan, counts: Sequence[int]) -> StepResult:
        """Execute a plan in one iteration with several tokens of each row, as in speculative decoding."""
        self._apply(plan)
        columns = []
        assert not plan.co_batched
        for seq_id, count in zip(plan.seq_ids, counts, strict=True):
            tokens = [self._sample(plan.service, seq_id, 1) for _ in range(count)]
            columns.append(tokens + [0] * (max(counts) - count))
        return StepResult(list(zip(*columns, strict=True)), [STEP_NS], counts)

    def fail(self, plan: StepPlan) -> None:
        """Execute a plan up to its forward pass, which fails after writing some KV of new tokens."""
        self._apply(plan)
        size = self.pool.block_size
        for seq_id, new in zip(plan.seq_ids, plan.new_tokens, strict=True):
            sequence = self.sequences[seq_id]
            for at in range(sequence.computed, sequence.computed + new):
                block = sequence.table[at // size]
                self._own(sequence.service, block)
                self.memory.setdefault((sequence.service, block), [0] * size)[at % size] = -1

    def drop(self, plan: StepPlan) -> None:
        """Apply only the changes of a plan behind a failed one."""
        self._apply(plan)
        for seq_id in plan.seq_ids:
            sequence = self.sequences[seq_id]
            if len(sequence.tokens) - sequence.computed == 1:
                # From now on the scheduler takes the last token of a prompt for a decode.
                sequence.joined_tokens = sequence.computed

    def write(self, service: str, block: int, slots: Sequence[int] | None) -> None:
        """Write KV of a block from another engine; None: it was not written there either."""
        assert not self.users[service, block], "writes into a block of a table"
        self._own(service, block)
        if slots is not None:
            self.memory[service, block] = list(slots)

    def _apply(self, plan: StepPlan) -> None:
        """Apply the changes of a plan."""
        for copy in plan.swap_out_copies:
            self._copy(copy)
        # A copy may write to a block of a sequence that leaves in this plan.
        for seq_id in plan.left:
            gone = self.sequences.pop(seq_id)
            self.users.subtract((gone.service, block) for block in gone.table)
        for seq_id, table in plan.moved:
            sequence = self.sequences[seq_id]
            assert len(table) == len(sequence.table)
            self.users.subtract((sequence.service, block) for block in sequence.table)
            sequence.table = list(table)
            self.users.update((sequence.service, block) for block in table)
        for copy in plan.copies:
            self._copy(copy)
        for joined in plan.joined:
            assert joined.seq_id not in self.seen, "a sequence number was used twice"
            self.seen.add(joined.seq_id)
            assert joined.computed < len(joined.tokens), "nothing is left to compute"
            tokens, table = list(joined.tokens), list(joined.blocks)
            self.sequences[joined.seq_id] = _Sequence(
                plan.service, tokens, joined.computed, table, len(tokens), joined.seed
            )
            self.users.update((plan.service, block) for block in joined.blocks)
        for seq_id, blocks in plan.grown:
            assert seq_id not in {joined.seq_id for joined in plan.joined}
            sequence = self.sequences[seq_id]
            sequence.table += blocks
            self.users.update((sequence.service, block) for block in blocks)
        assert len(set(plan.seq_ids)) == len(plan.seq_ids)
        decodes = plan.sampled == tuple(range(len(plan.seq_ids))) and set(plan.new_tokens) == {1}
        assert plan.iterations == 1 or decodes, "several iterations of a prompt"
        views = self.pool.layout.services
        for service, rows in plan.rows_by_service()[1:]:
            assert self.pool.layout.kind == "merged"
            assert replace(views[service], service=plan.service) == views[plan.service], "blocks differ"
            assert plan.new_tokens[rows] == (1,) * (rows.stop - rows.start) != (), "others only decode"
            assert set(range(rows.start, rows.stop)) <= set(plan.sampled), "others only decode"
            grown = [blocks for seq_id, blocks in plan.grown if seq_id in plan.seq_ids[rows]]
            assert all(len(blocks) == 1 for blocks in grown)

    def _compute(self, plan: StepPlan, new_tokens: Sequence[int]) -> list[int]:
        """One iteration; returns the sampled tokens."""
        tokens = []
        for service, rows in plan.rows_by_service():
            for row in range(rows.start, rows.stop):
                seq_id, new = plan.seq_ids[row], new_tokens[row]
                if row in plan.sampled:
                    tokens.append(self._sample(service, seq_id, new))
                else:
                    self._forward(service, self.sequences[seq_id], new)
        return tokens

    def _sample(self, service: str, seq_id: int, new: int) -> int:
        """Compute ``new`` tokens, the last one known among them, and sample the next."""
        sequence = self.sequences[seq_id]
        digest = self._forward(service, sequence, new)
        assert sequence.computed == len(sequence.tokens), "a token is sampled before its input is computed"
        if self.postpones(seq_id):
            sequence.computed -= 1  # its last token is computed again
            # From now on the scheduler takes the last token of a prompt for a decode.
            sequence.joined_tokens = min(sequence.joined_tokens, sequence.computed)
            return NO_TOKEN
        if self.vocabulary is None:
            digest, vocabulary = derive_seed(digest, sequence.seed), 1 << 63
        else:
            vocabulary = self.vocabulary
        sequence.tokens.append(digest % vocabulary)
        return sequence.tokens[-1]

    def _copy(self, copy: BlockCopy) -> None:
        assert not (copy.source_host and copy.target_host)
        source = self.host if copy.source_host else self.memory
        target = self.host if copy.target_host else self.memory
        if not copy.target_host:
            self._own(copy.service, copy.target)
        # A block that was reserved and not yet written has nothing to copy.
        target.pop((copy.service, copy.target), None)
        if (copy.service, copy.source) in source:
            target[copy.service, copy.target] = list(source[copy.service, copy.source])
        self.copied["in" if copy.source_host else "out" if copy.target_host else "within"] += 1

    def _forward(self, service: str, sequence: _Sequence, new: int) -> int:
        size = self.pool.block_size
        assert sequence.service == service
        assert new >= 1
        assert sequence.computed + new <= len(sequence.tokens), "more tokens than known"
        assert sequence.computed + new <= len(sequence.table) * size, "more tokens than blocks"
        digest = 0
        for at, token in enumerate(sequence.tokens[: sequence.computed + new]):
            digest = derive_seed(digest, token)
            block, slot = sequence.table[at // size], at % size
            if at < sequence.computed:
                assert self.owner[self._merged(service, block)] == service
                assert self.memory[service, block][slot] == digest, "KV of another prefix"
                continue
            assert self.users[service, block] == 1, "writes into a block of two tables"
            self._own(service, block)
            self.memory.setdefault((service, block), [0] * size)[slot] = digest
        sequence.computed += new
        self.computed_tokens += new
        return digest

    def _merged(self, service: str, block: int) -> int:
        return block // self.pool.layout.services[service].blocks_per_merged

    def _own(self, service: str, block: int) -> None:
        """A merged block taken by another service loses its content."""
        merged = self._merged(service, block)
        before = self.owner.get(merged)
        if before is not None and before != service:
            per_merged = self.pool.layout.services[before].blocks_per_merged
            for old in range(merged * per_merged, (merged + 1) * per_merged):
                assert self.users[before, old] == 0, "a merged block has two owners"
                self.memory.pop((before, old), None)
        self.owner[merged] = service
