"""The running group of a service, as an executor remembers it between plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shoal.core import Joined, SamplingParams, StepPlan


@dataclass(slots=True)
class RunningSequence:
    """One sequence with KV in the pool."""

    tokens: list[int]
    """Prompt and output so far."""
    prompt_tokens: int
    """How many of them are the prompt."""
    computed: int
    """Leading tokens whose KV is in the pool."""
    blocks: list[int]
    """Its block table."""
    sampling: SamplingParams
    """How its tokens are sampled."""
    seed: int
    """Keys its draws, with the output position."""
    penalty: "TokenCounts | None" = None
    """Token statistics of a sequence whose earlier tokens change its logits."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far; also the position that keys the next draw."""
        return len(self.tokens) - self.prompt_tokens

    def ends_with(self, token: int, eos_token_ids: Sequence[int]) -> bool:
        """Whether ``token``, its newest, is the end of it (its most tokens apart)."""
        params = self.sampling
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in eos_token_ids)
        return stops and self.output_tokens >= params.min_tokens


@dataclass(slots=True)
class TokenCounts:
    """What a penalised sequence has said."""

    seen: torch.Tensor
    """Which tokens prompt and output have: bool [vocab]."""
    output: torch.Tensor
    """How often the output has each: int32 [vocab]."""

    def add(self, token: int) -> None:
        """Count one more output token."""
        self.seen[token] = True
        self.output[token] += 1


@dataclass(slots=True)
class RunningGroups:
    """All sequences that have joined and not left, of all services."""

    sequences: dict[int, RunningSequence] = field(default_factory=dict)
    """By ``seq_id``."""

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's deltas."""
        for seq_id in plan.left:
            self.sequences.pop(seq_id, None)
        for seq_id, blocks in plan.moved:
            self.sequences[seq_id].blocks = list(blocks)
        for joined in plan.joined:
            self.sequences[joined.seq_id] = _enter(joined)
        for seq_id, blocks in plan.grown:
            self.sequences[seq_id].blocks.extend(blocks)

    def __getitem__(self, seq_id: int) -> RunningSequence:
        """The sequence with that number."""
        return self.sequences[seq_id]


def _enter(joined: Joined) -> RunningSequence:
    return RunningSequence(
        tokens=list(joined.tokens),
        prompt_tokens=joined.prompt_tokens,
        computed=joined.computed,
        blocks=list(joined.blocks),
        sampling=joined.sampling,
        seed=joined.seed,
    )
