"""Choosing each row's next token from its logits, in torch operations that wait for no result.

Draws are uniform numbers, searched in the cumulative distribution of the remaining tokens, in the order of
their ids. Tokens are ranked by falling logits, equal ones by rising ids. A row with top-k, top-p or min-p
keeps some of its likeliest tokens; if more than the candidates may remain, it is INCOMPLETE.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import NO_TOKEN, SamplingParams
from shoal.execute.transfers import to_device

CANDIDATES = 256
"""Number of likeliest tokens that are tried first for top-k, top-p and min-p."""
INCOMPLETE = -3
"""In place of a token: the row needs more candidates."""
_CHUNK = 256
"""Number of tokens in a chunk, whose weights are summed before a draw is searched inside it."""


def choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    draws: Sequence[float],
    candidates: int | None = None,
) -> torch.Tensor:
    """The next token of each row, int64 [rows]: NO_TOKEN where logits are not finite, or INCOMPLETE.

    logits: [rows, vocab], any float dtype. draws: a number in [0, 1) for each row. candidates: CANDIDATES by
    default.
    """
    candidates = candidates or CANDIDATES
    largest = logits.amax(-1, keepdim=True)
    tokens = largest.new_full((len(params),), INCOMPLETE, dtype=torch.int64)
    methods = [_method(one) for one in params]
    for method in dict.fromkeys(methods):
        members = [row for row, other in enumerate(methods) if other is method]
        chosen = [(params[row], draws[row]) for row in members]
        if len(members) == len(params):
            tokens = method(logits, largest, chosen, candidates)
        else:
            at = to_device(np.array(members), logits.device)
            tokens[at] = method(logits[at], largest[at], chosen, candidates)
    return torch.where(largest.squeeze(1).isfinite(), tokens, NO_TOKEN)


def choose_incomplete(
    logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float], tokens: list[int]
) -> list[int]:
    """``tokens``, as ``choose`` gave them for the same arguments, with those that were INCOMPLETE."""
    candidates = CANDIDATES
    while rows := [row for row, token in enumerate(tokens) if token == INCOMPLETE]:
        candidates = min(logits.shape[1], 8 * candidates)
        again = choose(logits[rows], [params[row] for row in rows], [draws[row] for row in rows], candidates)
        for row, token in zip(rows, again.tolist(), strict=True):
            tokens[row] = token
    return tokens


def may_be_incomplete(params: Sequence[SamplingParams]) -> bool:
    """Whether ``choose`` may return INCOMPLETE for a row."""
    return any(_method(one) is _from_candidates for one in params)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Sampling parameters of rows, on the device [rows, 1]."""

    draws: torch.Tensor
    inverse_temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, rows: "_Rows", device: torch.device) -> "_Numbers":
        """Sent in one copy."""
        numbers = [
            (draw, 1.0 / (one.temperature or 1.0), one.top_k, one.top_p, one.min_p) for one, draw in rows
        ]
        sent = to_device(np.array(numbers, dtype=np.float64).T, device).unsqueeze(-1)
        draws, inverse, top_k, top_p, min_p = sent
        return cls(draws, inverse.float(), top_k.long(), top_p, min_p.float())


_Rows = Sequence[tuple[SamplingParams, float]]
"""Sampling parameters and draw of each row."""
_Method = Callable[[torch.Tensor, torch.Tensor, _Rows, int], torch.Tensor]


def _greedy(logits: torch.Tensor, largest: torch.Tensor, rows: _Rows, candidates: int) -> torch.Tensor:
    del largest, rows, candidates
    return logits.argmax(-1)


def _from_all(logits: torch.Tensor, largest: torch.Tensor, rows: _Rows, candidates: int) -> torch.Tensor:
    """Choose from the whole vocabulary: first a chunk by the sums of chunks, then a token in it."""
    del candidates
    numbers = _Numbers.of(rows, logits.device)
    weights = ((logits.float() - largest.float()) * numbers.inverse_temperatures).exp()
    chunks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CHUNK)).view(len(rows), -1, _CHUNK)
    sums = chunks.sum(-1, dtype=torch.float64)
    targets = numbers.draws * sums.sum(-1, keepdim=True)
    chunk, before = _search_cumulative(sums, targets)
    chosen = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK)).squeeze(1)
    index, _ = _search_cumulative(chosen, targets - before)
    return (chunk * _CHUNK + index).squeeze(1)


def _from_candidates(
    logits: torch.Tensor, largest: torch.Tensor, rows: _Rows, candidates: int
) -> torch.Tensor:
    """Choose with top-k, top-p or min-p from the likeliest tokens."""
    numbers = _Numbers.of(rows, logits.device)
    logits, largest, inverse = logits.float(), largest.float(), numbers.inverse_temperatures
    vocab = logits.shape[1]
    width = min(candidates, vocab)
    total = ((logits - largest) * inverse).exp().sum(-1, keepdim=True, dtype=torch.float64)
    values, ids = _ranked(logits, width)
    weights = ((values - largest) * inverse).exp()
    kept = _keep_mask(weights, numbers, total)
    # Tokens beyond the candidates with the same logit as the last one would be kept, too.
    last = values.gather(1, kept.sum(-1, keepdim=True) - 1)
    complete = ((values[:, -1:] < last) & (numbers.top_k <= width)) | (width == vocab)
    ids, order = ids.sort(-1)
    weights = (weights * kept).gather(1, order)
    index, _ = _search_cumulative(weights, numbers.draws * weights.sum(-1, keepdim=True, dtype=torch.float64))
    return torch.where(complete, ids.gather(1, index), INCOMPLETE).squeeze(1)


def _method(params: SamplingParams) -> _Method:
    if params.greedy:
        return _greedy
    return _from_candidates if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else _from_all


def _search_cumulative(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [rows, 1] at which the cumulative weight exceeds the target, and the cumulative weight before it.

    weights: [rows, n], at least 0. The target is clamped to at least 0 and less than the sum, so that the
    weight at the index is positive.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.minimum(targets.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, targets, right=True).clamp(max=weights.shape[1] - 1)
    return index, cumulative.gather(1, index) - weights.gather(1, index)


def _ranked(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest logits of each row and their ids, in order: equal ones by rising ids."""
    if width == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(width, dim=-1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep_mask(weights: torch.Tensor, numbers: _Numbers, total: torch.Tensor) -> torch.Tensor:
    """Which candidates remain: bool [rows, n], a prefix of each row.

    weights: in falling order, 1 for the likeliest. total: weight of all tokens. Top-k comes first, then
    top-p of the rest, and min-p relative to the likeliest.
    """
    limited = numbers.top_k > 0
    in_k = (torch.arange(weights.shape[1], device=weights.device) < numbers.top_k) | ~limited
    likely = (weights * in_k).double()
    mass = likely.cumsum(-1)
    left = torch.where(limited, mass[:, -1:], total)
    in_p = (mass - likely < numbers.top_p * left) | (numbers.top_p >= 1)
    kept = in_k & in_p & (weights >= numbers.min_p) & (weights > 0)
    kept[:, 0] = True
    return kept
