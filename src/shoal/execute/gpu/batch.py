"""The batch of a step on a GPU: its numbers go there in one copy, and token ids may be known only there.

With two plans in flight a row decodes a token that the step before it samples. That token never comes from
the host: it is read from ``SlotState.next_ids``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.gpu.step import PromptRows, StepInputs
from shoal.execute.sequences import RunningSequence, SequenceTable
from shoal.execute.transfers import to_device

UNKNOWN = -1
"""Token id that is known on the device only."""
_MIN_SLOTS = 512


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

    def ids(self, given: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [tokens]: ``given``, or the newest of the slot where it is UNKNOWN."""
        return torch.where(given < 0, self.next_ids[slots.clamp(min=0).long()], given.long())


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step on the host. Decodes come first, else rows have the order of the plan."""

    ids: np.ndarray
    """Token ids, or UNKNOWN, int32 [tokens]; so are the next two."""
    positions: np.ndarray
    slots: np.ndarray
    """Slot of each row's sequence, int32 [rows]."""
    starts: np.ndarray
    """Index of each row's first token, and the end: [rows + 1]."""
    firsts: np.ndarray
    """Position of each row's first token [rows]."""
    last: np.ndarray
    """Index of the last token of each row of the plan [rows]."""
    decodes: int

    @classmethod
    def of(
        cls, sequences: SequenceTable, rows: Sequence[RunningSequence], new_tokens: Sequence[int]
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
        return cls(
            np.array(ids, dtype=np.int32),
            positions.astype(np.int32),
            slots.astype(np.int32),
            starts,
            firsts,
            last,
            int((counts == 1).sum()),
        )

    def words(self, size: int | None = None) -> np.ndarray:
        """Ids, positions and slots of all tokens, then the lengths of decodes; size: with padding to so many
        decodes, of a step in which all rows decode."""
        tokens = len(self.ids)
        slots = np.repeat(self.slots, np.diff(self.starts))
        lengths = self.firsts[: self.decodes].astype(np.int32) + 1
        if size is None:
            return np.concatenate([self.ids, self.positions, slots, lengths])
        padded = np.zeros((4, size), dtype=np.int32)
        padded[:, :tokens] = self.ids, self.positions, slots, lengths
        padded[2, tokens:] = -1
        return padded.ravel()

    def inputs(
        self, words: torch.Tensor, size: int | None, state: SlotState
    ) -> tuple[torch.Tensor, StepInputs]:
        """Token ids [tokens] and the other inputs; words: ``self.words(size)`` on the device."""
        tokens = len(self.ids)
        if size is None:
            given, positions, slots = words[: 3 * tokens].view(3, tokens)
            lengths = words[3 * tokens :]
        else:
            given, positions, slots, lengths = words.view(4, size)[:, :tokens]
        prompts = None
        if self.decodes < len(self.slots):
            prompts = PromptRows(
                self.starts[self.decodes :], self.firsts[self.decodes :], self.slots[self.decodes :]
            )
        inputs = StepInputs(positions.long(), slots, lengths, state.tables, prompts)
        return state.ids(given, slots), inputs


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
