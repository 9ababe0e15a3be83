"""Running sequences in the executor between plans: tokens, block tables, computed tokens, sampling state."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import NewSequence, SamplingParams, StepPlan, derive_seed
from shoal.forecast.draws import derive_seeds, uniforms


@dataclass(slots=True)
class RunningSequence:
    """One sequence with KV in the pool."""

    tokens: list[int]
    """Prompt and output so far."""
    prompt_tokens: int
    slot: int
    """Row in the arrays of ``SequenceTable``."""
    sampling: SamplingParams
    seed: int
    """Key of its random draws, together with the output position."""
    penalty: "TokenCounts | None" = None
    """Token counts; None until a penalty needs them."""
    bias: "TokenBias | None" = None
    """Logit biases and allowed tokens; None until they are needed."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far; also the output position of the next draw."""
        return len(self.tokens) - self.prompt_tokens

    def stops_at(self, token: int, eos_token_ids: Sequence[int]) -> bool:
        """Whether ``token``, its newest, ends the sequence (``max_tokens`` is not checked)."""
        params = self.sampling
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in eos_token_ids)
        return stops and params.may_stop_at(self.output_tokens)


class TokenCounts:
    """Counts of the tokens of a sequence, for penalties."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        self.tokens = array("q")
        """Distinct tokens of prompt and output."""
        self.times = array("q")
        """Number of times that the output has each of them."""
        self._places: dict[int, int] = {}
        for token in tokens[:prompt_tokens]:
            self._count(token, 0)
        for token in tokens[prompt_tokens:]:
            self._count(token, 1)

    def add(self, token: int) -> None:
        self._count(token, 1)

    def _count(self, token: int, times: int) -> None:
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.times.append(0)
        self.times[place] += times


class TokenBias:
    """Logit biases and allowed tokens of a sequence, as tensors; the same at every position."""

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
    """All running sequences of all services.

    What a step needs is in arrays with a row (*slot*) for each sequence. They grow as needed and are updated
    by the deltas of plans, so that a step selects rows and builds nothing.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, RunningSequence] = {}
        """By ``seq_id``."""
        self.tables = np.zeros((1, 1), dtype=np.int64)
        """Block tables [slots, blocks]; entries beyond a sequence's blocks are left over from earlier
        sequences."""
        self.num_blocks = np.zeros(1, dtype=np.int64)
        """Blocks of each table [slots]."""
        self.computed = np.zeros(1, dtype=np.int64)
        """Number of leading tokens whose KV is in the pool [slots]."""
        self.seeds = np.zeros(1, dtype=np.uint64)
        """``derive_seed(seed)`` of the seed of random draws [slots]."""
        self.prompt_tokens = np.zeros(1, dtype=np.int64)
        """[slots]"""
        self.changed: list[tuple[int, int, Sequence[int]]] = []
        """Table entries that the last plan set: slot, first column, blocks; in order."""
        self._free = [0]
        """Free slots."""

    def apply(self, plan: StepPlan) -> None:
        self.changed = []
        for seq_id in plan.left:
            gone = self.sequences.pop(seq_id, None)
            if gone is not None:
                self._free.append(gone.slot)
        for seq_id, blocks in plan.moved:
            self._put_blocks(self.sequences[seq_id].slot, blocks, start=0)
        for joined in plan.joined:
            self._add(joined)
        for seq_id, blocks in plan.grown:
            slot = self.sequences[seq_id].slot
            self._put_blocks(slot, blocks, start=int(self.num_blocks[slot]))

    def advance(self, rows: Iterable[RunningSequence], new_tokens: Sequence[int]) -> None:
        """Add ``new_tokens[i]`` to the computed tokens of each of ``rows``."""
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        self.computed[slots] += np.array(new_tokens, dtype=np.int64)

    def draws(self, slots: Sequence[int]) -> np.ndarray:
        """The random draws for the tokens behind the computed ones of sequences, in [0, 1): [slots]."""
        outputs = self.computed[slots] - self.prompt_tokens[slots]
        return uniforms(derive_seeds(self.seeds[slots], outputs))

    def __getitem__(self, seq_id: int) -> RunningSequence:
        return self.sequences[seq_id]

    def _add(self, joined: NewSequence) -> None:
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
        self.seeds[slot] = derive_seed(joined.seed)
        self.prompt_tokens[slot] = joined.prompt_tokens
        self._put_blocks(slot, joined.blocks, start=0)

    def _put_blocks(self, slot: int, blocks: Sequence[int], *, start: int) -> None:
        """Set a table's entries from column ``start`` to its end to ``blocks``."""
        end = start + len(blocks)
        if end > self.tables.shape[1]:
            wider = np.zeros((len(self.tables), max(end, 2 * self.tables.shape[1])), dtype=np.int64)
            wider[:, : self.tables.shape[1]] = self.tables
            self.tables = wider
        self.tables[slot, start:end] = blocks
        self.num_blocks[slot] = end
        self.changed.append((slot, start, blocks))

    def _add_slots(self) -> None:
        count = len(self.tables)
        self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros_like(self.num_blocks)])
        self.computed = np.concatenate([self.computed, np.zeros_like(self.computed)])
        self.seeds = np.concatenate([self.seeds, np.zeros_like(self.seeds)])
        self.prompt_tokens = np.concatenate([self.prompt_tokens, np.zeros_like(self.prompt_tokens)])
        self._free += range(2 * count - 1, count - 1, -1)
