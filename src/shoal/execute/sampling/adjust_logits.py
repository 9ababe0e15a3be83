"""Adjusting logits before sampling: penalties, logit biases, and no early end before ``min_tokens``."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from shoal.execute.grammar.masks import RowMasks
from shoal.execute.sampling.logit_bias import apply_bias
from shoal.execute.sequences import RunningSequence, TokenCounts


def needs_adjustment(row: RunningSequence) -> bool:
    """Whether ``adjust_logits`` changes the logits of this row."""
    params = row.sampling
    return params.has_penalties or params.has_bias or row.output_tokens < params.min_tokens


def adjust_logits(
    logits: torch.Tensor,
    rows: Sequence[RunningSequence],
    eos_token_ids: Sequence[int],
    masked: Collection[int] = (),
) -> None:
    """Apply biases, penalties and the ban on early ends, in this order, in place; logits [rows, vocab].

    masked: rows whose early ends are banned in their masks instead (``ban_early_ends``).
    """
    apply_bias(logits, rows)
    penalised = [i for i, row in enumerate(rows) if row.sampling.has_penalties]
    if penalised:
        _penalise(logits, rows, penalised)
    banned = [
        (i, token)
        for i, row in enumerate(rows)
        if i not in masked
        for token in _banned_ends(row, eos_token_ids)
        if token < logits.shape[1]
    ]
    if banned:
        at_row, at_token = torch.tensor(banned, device=logits.device).T
        logits[at_row, at_token] = float("-inf")


def ban_early_ends(masks: RowMasks, rows: Sequence[RunningSequence], eos_token_ids: Sequence[int]) -> None:
    """Remove early ends from masks that also allow other tokens; in place."""
    for row, mask in zip(masks.rows, masks.bits, strict=True):
        tokens = [token for token in _banned_ends(rows[row], eos_token_ids) if token < 32 * len(mask)]
        if tokens:
            later = mask.copy()
            for token in tokens:
                later[token // 32] &= ~np.uint32(1 << token % 32)
            if later.any():
                mask[:] = later


def _banned_ends(row: RunningSequence, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that are banned because they would end the output before ``min_tokens``."""
    params = row.sampling
    if row.output_tokens >= params.min_tokens:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))


def _penalise(logits: torch.Tensor, rows: Sequence[RunningSequence], penalised: Sequence[int]) -> None:
    """Apply penalties to the distinct tokens of each penalised row, in place."""
    all_counts = [_token_counts(rows[i]) for i in penalised]
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


def _token_counts(row: RunningSequence) -> TokenCounts:
    if row.penalty is None:
        row.penalty = TokenCounts(row.tokens, row.prompt_tokens)
    return row.penalty
