"""What earlier tokens, biases and ``min_tokens`` do to logits: of all rows that ask for it at once."""

from collections.abc import Sequence

import numpy as np
import torch

from shoal.execute.biases import bias
from shoal.execute.grammar_masks import RowMasks
from shoal.execute.group import RunningSequence, TokenCounts


def is_adjusted(row: RunningSequence) -> bool:
    """Whether ``adjust`` changes the logits of this row."""
    params = row.sampling
    return (
        params.penalised
        or params.biased
        or row.output_tokens < params.min_tokens
        or params.grammar is not None
    )


def adjust(
    logits: torch.Tensor,
    rows: Sequence[RunningSequence],
    eos_token_ids: Sequence[int],
    masks: RowMasks | None = None,
) -> None:
    """Apply biases, penalties, masks and the ban on early ends, in this order, to logits [rows, vocab] of
    float32, in place.

    Where a mask allows only what is banned, it is not banned.
    """
    bias(logits, rows)
    penalised = [i for i, row in enumerate(rows) if row.sampling.penalised]
    if penalised:
        _penalise(logits, rows, penalised)
    banned = [
        (i, token)
        for i, row in enumerate(rows)
        if row.output_tokens < row.sampling.min_tokens
        for token in (*row.sampling.stop_token_ids, *(() if row.sampling.ignore_eos else eos_token_ids))
        if token < logits.shape[1]
    ]
    if masks is not None:
        banned = _mask(logits, masks, banned)
    if banned:
        at_row, at_token = torch.tensor(banned, device=logits.device).T
        logits[at_row, at_token] = float("-inf")


def _mask(logits: torch.Tensor, masks: RowMasks, banned: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Apply masks; returns what of ``banned`` (rows and tokens) is still to be banned."""
    vocab = logits.shape[1]
    allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=vocab, bitorder="little").view(bool)
    for row, may in zip(masks.rows, allowed, strict=True):
        later = may.copy()
        later[[token for banned_row, token in banned if banned_row == row]] = False
        left = later if later.any() else may
        logits[row].masked_fill_(torch.from_numpy(~left).to(logits.device), float("-inf"))
    return [entry for entry in banned if entry[0] not in masks.rows]


def _penalise(logits: torch.Tensor, rows: Sequence[RunningSequence], penalised: Sequence[int]) -> None:
    """Only tokens that a row has are looked at, each once."""
    all_counts = [_counts(rows[i]) for i in penalised]
    sizes = [len(counts.tokens) for counts in all_counts]
    tokens = np.concatenate([np.frombuffer(counts.tokens, dtype=np.int64) for counts in all_counts])
    times = np.concatenate([np.frombuffer(counts.times, dtype=np.int64) for counts in all_counts])
    params = [rows[i].sampling for i in penalised]
    strengths = np.array(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], dtype=np.float32
    )
    device = logits.device
    at_row = torch.from_numpy(np.repeat(penalised, sizes)).to(device)
    at_token = torch.from_numpy(tokens).to(device)
    output = torch.from_numpy(times).to(device)
    repetition, frequency, presence = torch.from_numpy(np.repeat(strengths, sizes, axis=0)).to(device).T
    old = logits[at_row, at_token]
    new = torch.where(old > 0, old / repetition, old * repetition)
    logits[at_row, at_token] = new - frequency * output - presence * (output > 0)


def _counts(row: RunningSequence) -> TokenCounts:
    if row.penalty is None:
        row.penalty = TokenCounts(row.tokens, row.prompt_tokens)
    return row.penalty
