"""The running group of a service, as an executor remembers it between plans."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import NewSequence, SamplingParams, StepPlan


@dataclass(slots=True)
class RunningSequence:
    """One sequence with KV in the pool."""

    tokens: list[int]
    """Prompt and output so far."""
    prompt_tokens: int
    """How many of them are the prompt."""
    slot: int
    """Its row in the tables of `SequenceTable`."""
    sampling: SamplingParams
    """How its tokens are sampled."""
    seed: int
    """Keys its draws, with the output position."""
    penalty: "TokenCounts | None" = None
    """Token statistics of a sequence whose earlier tokens change its logits."""
    bias: "TokenBias | None" = None
    """What changes the logits of a sequence at every position."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far; also the position that keys the next draw."""
        return len(self.tokens) - self.prompt_tokens

    def ends_with(self, token: int, eos_token_ids: Sequence[int]) -> bool:
        """Whether ``token``, its newest, is the end of it (its most tokens apart)."""
        params = self.sampling
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in eos_token_ids)
        return stops and params.may_stop_at(self.output_tokens)


class TokenCounts:
    """Which tokens a penalised sequence has, and how often."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        self.tokens = array("q")
        """The tokens of prompt and output, each once."""
        self.times = array("q")
        """How often the output has each of them."""
        self._places: dict[int, int] = {}
        for token in tokens[:prompt_tokens]:
            self._count(token, 0)
        for token in tokens[prompt_tokens:]:
            self._count(token, 1)

    def add(self, token: int) -> None:
        """Count one more output token."""
        self._count(token, 1)

    def _count(self, token: int, times: int) -> None:
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.times.append(0)
        self.times[place] += times


class TokenBias:
    """What biases and allowed tokens do to a sequence's logits, the same at every position."""

    def __init__(self, sampling: SamplingParams, device: torch.device) -> None:
        tokens = [token for token, _ in sampling.logit_bias]
        self._tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self._added = torch.tensor([bias for _, bias in sampling.logit_bias], device=device)
        self._allowed = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64, device=device)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits [vocab] of float32 in place."""
        if len(self._tokens):
            logits[self._tokens] += self._added
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill_(float("-inf"))
            logits[self._allowed] = kept


class SequenceTable:
    """All sequences that have joined and not left, of all services.

    What a step needs of each is in arrays with a row (its *slot*) for every sequence, which grow as needed
    and are changed by the plans' deltas, so that a step picks rows and builds nothing.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, RunningSequence] = {}
        """By ``seq_id``."""
        self.tables = np.zeros((1, 1), dtype=np.int64)
        """Block tables [slots, blocks]; what lies behind a sequence's blocks is left over from others."""
        self.num_blocks = np.zeros(1, dtype=np.int64)
        """Blocks of each table [slots]."""
        self.computed = np.zeros(1, dtype=np.int64)
        """Leading tokens whose KV is in the pool [slots]."""
        self._free = [0]
        """Slots of no sequence."""

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's deltas."""
        for seq_id in plan.left:
            gone = self.sequences.pop(seq_id, None)
            if gone is not None:
                self._free.append(gone.slot)
        for seq_id, blocks in plan.moved:
            self._put_blocks(self.sequences[seq_id].slot, blocks, behind=0)
        for joined in plan.joined:
            self._enter(joined)
        for seq_id, blocks in plan.grown:
            slot = self.sequences[seq_id].slot
            self._put_blocks(slot, blocks, behind=int(self.num_blocks[slot]))

    def advance(self, rows: Iterable[RunningSequence], new_tokens: Sequence[int]) -> None:
        """Count the KV of ``new_tokens[i]`` more tokens of each of ``rows`` as in the pool."""
        self.computed[[row.slot for row in rows]] += new_tokens

    def __getitem__(self, seq_id: int) -> RunningSequence:
        """The sequence with that number."""
        return self.sequences[seq_id]

    def _enter(self, joined: NewSequence) -> None:
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self.sequences[joined.seq_id] = RunningSequence(
            tokens=list(joined.tokens),
            prompt_tokens=joined.prompt_tokens,
            slot=slot,
            sampling=joined.sampling,
            seed=joined.seed,
        )
        self.computed[slot] = joined.computed
        self._put_blocks(slot, joined.blocks, behind=0)

    def _put_blocks(self, slot: int, blocks: Sequence[int], *, behind: int) -> None:
        """Make ``blocks`` a table's entries from column ``behind`` to its end."""
        end = behind + len(blocks)
        if end > self.tables.shape[1]:
            wider = np.zeros((len(self.tables), max(end, 2 * self.tables.shape[1])), dtype=np.int64)
            wider[:, : self.tables.shape[1]] = self.tables
            self.tables = wider
        self.tables[slot, behind:end] = blocks
        self.num_blocks[slot] = end

    def _add_slots(self) -> None:
        """Twice as many slots, of which the new ones are free."""
        count = len(self.tables)
        self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros_like(self.num_blocks)])
        self.computed = np.concatenate([self.computed, np.zeros_like(self.computed)])
        self._free += range(2 * count - 1, count - 1, -1)
