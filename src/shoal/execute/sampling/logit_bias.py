"""Logit biases, allowed tokens and banned sequences (``bad_words``) of requests."""

from collections.abc import Sequence

import torch

from shoal.execute.sequences import RunningSequence, TokenBias


def apply_bias(logits: torch.Tensor, rows: Sequence[RunningSequence]) -> None:
    """Apply biases, then bans, to logits [rows, vocab] in float32, in place."""
    for at, row in enumerate(rows):
        if row.sampling.has_bias:
            if row.bias is None:
                row.bias = TokenBias(row.sampling, logits.device)
            row.bias.apply(logits[at])
            if banned := _banned_tokens(row):
                logits[at, banned] = float("-inf")


def _banned_tokens(row: RunningSequence) -> list[int]:
    """Tokens that would complete a banned sequence."""
    return [sequence[-1] for sequence in row.sampling.banned_sequences if _ends_with(row, sequence[:-1])]


def _ends_with(row: RunningSequence, tokens: Sequence[int]) -> bool:
    """Whether the output ends with these tokens."""
    count = len(tokens)
    return not count or (count <= row.output_tokens and row.tokens[-count:] == list(tokens))
