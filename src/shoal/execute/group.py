"""The running group of a service, as an executor remembers it between plans."""

from dataclasses import dataclass, field

import torch

from shoal.core import Joined, SamplingParams, StepPlan


@dataclass(slots=True)
class RunningSequence:
    """One sequence with KV in the pool.

    tokens: prompt and output so far. computed: leading tokens whose KV is in the pool. blocks: block
    table. penalty: token statistics of a sequence whose earlier tokens change its logits.
    """

    tokens: list[int]
    prompt_tokens: int
    computed: int
    blocks: list[int]
    sampling: SamplingParams
    seed: int
    penalty: "TokenCounts | None" = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far; also the position that keys the next draw."""
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True)
class TokenCounts:
    """What a penalised sequence has said: ``seen`` bool [vocab] over prompt and output, ``output``
    int32 [vocab] over the output."""

    seen: torch.Tensor
    output: torch.Tensor

    def add(self, token: int) -> None:
        """Count one more output token."""
        self.seen[token] = True
        self.output[token] += 1


@dataclass(slots=True)
class RunningGroups:
    """All sequences that have joined and not left, of all services."""

    sequences: dict[int, RunningSequence] = field(default_factory=dict)

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's deltas."""
        for number in plan.left:
            self.sequences.pop(number, None)
        for number, blocks in plan.moved:
            self.sequences[number].blocks = list(blocks)
        for joined in plan.joined:
            self.sequences[joined.seq_id] = _enter(joined)
        for number, blocks in plan.grown:
            self.sequences[number].blocks.extend(blocks)

    def __getitem__(self, number: int) -> RunningSequence:
        """The sequence with that number."""
        return self.sequences[number]


def _enter(joined: Joined) -> RunningSequence:
    return RunningSequence(
        tokens=list(joined.tokens),
        prompt_tokens=joined.prompt_tokens,
        computed=joined.computed,
        blocks=list(joined.blocks),
        sampling=joined.sampling,
        seed=joined.seed,
    )
