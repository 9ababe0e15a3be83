"""The batch of a step on a GPU: its numbers go there in one copy, and token ids may be known only there.

With two plans in flight a row decodes a token that the step before it samples. That token never comes from
the host: it is read from ``SlotState.next_ids``.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import numpy as np
import torch

from shoal.execute.gpu.step import StepInputs
from shoal.execute.sequences import RunningSequence, SequenceTable
from shoal.execute.transfers import to_device

UNKNOWN = -1
"""Token id that is known on the device only."""
_MIN_SLOTS = 512
_ALIGNMENT = 4
"""Words: the parts of a step's numbers are aligned to 16 bytes, for which kernels are compiled."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many there are of what a step computes; of a recorded step, at most, with padding."""

    tokens: int
    decodes: int
    sampled: int
    """Tokens whose logits are computed."""
    prompts: int
    """Rows with more than one token."""

    @classmethod
    def of_decodes(cls, rows: int) -> "StepShape":
        """Of a step in which all rows decode."""
        return cls(tokens=rows, decodes=rows, sampled=rows, prompts=0)

    def __str__(self) -> str:
        prompts = f", {self.prompts} prompts" if self.prompts else ""
        return f"{self.tokens} tokens with {self.decodes} decodes{prompts}"

    def fits(self, other: "StepShape") -> bool:
        """Whether padding makes a step of the other shape of it."""
        return (
            self.tokens <= other.tokens
            and self.decodes <= other.decodes
            and self.sampled <= other.sampled
            and self.prompts <= other.prompts
        )

    def limited(self, limit: "StepShape") -> "StepShape":
        """The largest shape that fits into both."""
        return StepShape(*map(min, astuple(self), astuple(limit)))

    @property
    def parts(self) -> tuple[slice, ...]:
        """Where the words have ids, positions, slots, lengths, sampled tokens and prompts."""
        sizes = (*(self.tokens,) * 3, self.decodes, self.sampled, 4 * self.prompts)
        ends = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        return tuple(slice(begin, begin + size) for begin, size in zip(ends, sizes, strict=False))

    @property
    def words(self) -> int:
        """Number of words of such a step."""
        end: int = self.parts[-1].stop
        return -(-end // _ALIGNMENT) * _ALIGNMENT


class SlotState:
    """What the device keeps of running sequences, by their slots in the SequenceTable.

    device: may be the CPU, for tests.
    """

    def __init__(self, device: torch.device) -> None:
        self.tables = torch.zeros((_MIN_SLOTS, 1, 1), dtype=torch.int32, device=device)
        """Block tables [slots, blocks, 1] of the merged layout."""
        self.next_ids = torch.zeros(_MIN_SLOTS, dtype=torch.int64, device=device)
        """The newest sampled token of each sequence [slots]."""

    def fits(self, slots: int, blocks: int) -> bool:
        return slots <= len(self.tables) and blocks <= self.tables.shape[1]

    def grow(self, slots: int, blocks: int) -> None:
        """Make room for at least that many; what graphs read moves elsewhere."""
        rows = len(self.tables)
        while rows < slots:
            rows *= 2
        wider = self.tables.new_zeros((rows, max(blocks, self.tables.shape[1]), 1))
        wider[: len(self.tables), : self.tables.shape[1]] = self.tables
        ids = self.next_ids.new_zeros(rows)
        ids[: len(self.next_ids)] = self.next_ids
        self.tables, self.next_ids = wider, ids

    def put_tables(self, words: torch.Tensor) -> None:
        """Set entries of the tables; words: from ``table_words``."""
        places, blocks = words.view(2, -1)
        self.tables.view(-1)[places.long()] = blocks

    def inputs(
        self, words: torch.Tensor, shape: StepShape
    ) -> "tuple[torch.Tensor, torch.Tensor, StepInputs]":
        """Ids of a step's tokens, int64 [tokens], the sampled tokens, int64 [sampled], and other inputs.

        words: ``StepNumbers.words(shape)`` on the device. UNKNOWN ids are the newest of the token's slot.
        """
        _, _, slots, lengths, _, prompts = (words[part] for part in shape.parts)
        wide = words.long()  # what indexes tensors, in one operation
        given, positions, wide_slots, _, sampled, _ = (wide[part] for part in shape.parts)
        ids = torch.where(given < 0, self.next_ids[wide_slots.clamp(min=0)], given)
        return ids, sampled, StepInputs(positions, slots, lengths, prompts.view(-1, 4), self.tables)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step on the host. Decodes come first, else rows have the order of the plan."""

    ids: np.ndarray
    """Token ids, or UNKNOWN, int64 [tokens]; so are the next two."""
    positions: np.ndarray
    slots: np.ndarray
    """Slot of each token's sequence."""
    decodes: int
    prompts: np.ndarray
    """Rows with more than one token [prompts, 4], as in ``prompt_tiles``."""
    last: np.ndarray
    """Index of the last token of each row of the plan [rows]."""
    sampled: np.ndarray
    """Indices of the tokens whose logits are computed: of rows that sample, or one if none does."""

    @classmethod
    def of(
        cls,
        sequences: SequenceTable,
        rows: Sequence[RunningSequence],
        new_tokens: Sequence[int],
        sampled: Sequence[int],
    ) -> "StepNumbers":
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        counts = np.array(new_tokens, dtype=np.int64)
        order = np.argsort(counts > 1, kind="stable")
        slots, counts = slots[order], counts[order]
        firsts = sequences.computed[slots]
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        ids: list[int] = []
        for row, first, count in zip(order.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            tokens = rows[row].tokens
            ids += tokens[first : first + count]
            if first + count > len(tokens):
                ids.append(UNKNOWN)
        positions = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
        last = np.empty_like(order)
        last[order] = starts[1:] - 1
        decodes = int((counts == 1).sum())
        return cls(
            ids=np.array(ids, dtype=np.int64),
            positions=positions,
            slots=np.repeat(slots, counts),
            decodes=decodes,
            prompts=np.stack([slots, starts[:-1], counts, firsts], axis=1)[decodes:],
            last=last,
            sampled=last[list(sampled) or [0]],
        )

    @property
    def shape(self) -> StepShape:
        """Without padding."""
        return StepShape(len(self.ids), self.decodes, len(self.sampled), len(self.prompts))

    def words(self, shape: StepShape) -> np.ndarray:
        """All numbers that the device needs, int32 [shape.words], with padding to a shape."""
        found = padding_words(shape)
        ids, positions, slots, lengths, sampled, prompts = (found[part] for part in shape.parts)
        tokens = len(self.ids)
        ids[:tokens], positions[:tokens], slots[:tokens] = self.ids, self.positions, self.slots
        lengths[: self.decodes] = self.positions[: self.decodes] + 1
        sampled[: len(self.sampled)] = self.sampled
        prompts[: self.prompts.size] = self.prompts.ravel()
        return found


def padding_words(shape: StepShape) -> np.ndarray:
    """As ``StepNumbers.words``, of a step that has nothing but padding.

    That are tokens without a slot, decodes of length 0, and prompts without tokens. Its logits are those of
    the first token.
    """
    found = np.zeros(shape.words, dtype=np.int32)
    found[shape.parts[2]] = -1
    return found


def table_words(changed: Sequence[tuple[int, int, Sequence[int]]], width: int) -> np.ndarray:
    """Changes of block tables (slot, first column, blocks): flat places in tables of ``width`` columns, then
    their blocks, int32. Of several changes of one entry the last counts. Columns beyond the width are left
    out: such sequences are of services that were removed."""
    places: list[np.ndarray] = []
    blocks: list[int] = []
    for slot, column, entries in changed:
        some = entries[: max(0, width - column)]
        places.append(np.arange(slot * width + column, slot * width + column + len(some)))
        blocks += some
    if not blocks:
        return np.zeros(0, dtype=np.int32)
    flat, values = np.concatenate(places), np.array(blocks, dtype=np.int32)
    unique, at = np.unique(flat[::-1], return_index=True)
    return np.concatenate([unique.astype(np.int32), values[::-1][at]])


def to_words(
    numbers: np.ndarray, changes: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the device, int32, in one copy."""
    words = to_device(np.concatenate([numbers, changes]), device)
    return words[: len(numbers)], words[len(numbers) :]
