"""Sampling the next token of each row of a step: greedy, top-k, top-p, min-p, temperature, log-probabilities.

Draws are counter-based: a uniform number keyed by (seed, output position) is searched in the cumulative
distribution of the remaining tokens, in the order of their ids. Tokens are ranked by falling logits, equal
ones by rising ids. So a sequence's tokens do not depend on other rows of the batch, preemptions or prefix
cache hits.

On CPUs a native kernel samples (``native_sampler``); the torch operations here do the same up to rounding.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shoal.core import NO_TOKEN, Failure, FinishReason, SamplingParams, TokenLogprobs, uniform
from shoal.execute.grammar.masks import RowMasks
from shoal.execute.sampling.adjust_logits import adjust_logits, ban_early_ends, needs_adjustment
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sequences import RunningSequence

CANDIDATES = 256
"""Number of likeliest tokens that are tried first for top-k, top-p and min-p."""
_CHUNK = 256
"""Number of tokens in a chunk, whose weights are summed before a draw is searched inside it."""

_NO_TOKEN_LEFT = Failure(
    "the request's own limits leave no token: its grammar, allowed_token_ids, bad_words and min_tokens "
    "exclude one another",
    FinishReason.INVALID,
)


class Sampled(NamedTuple):
    """The sampled tokens of a step's rows."""

    tokens: list[int]
    """The next token of each row, or NO_TOKEN."""
    logprobs: list[TokenLogprobs | None] | None
    """Of these tokens; None if no row requests them."""
    failures: Mapping[int, Failure]
    """Why rows have NO_TOKEN, by index; other rows with NO_TOKEN had logits that are not finite."""
    postponed: frozenset[int] = frozenset()
    """Rows that have NO_TOKEN because their masks have not arrived."""


def sample(
    logits: torch.Tensor,
    rows: Sequence[RunningSequence],
    eos_token_ids: Sequence[int],
    native: NativeSampler | None = None,
    masks: RowMasks | None = None,
) -> Sampled:
    """Sample the next token of each row.

    logits: [rows, vocab], any float dtype; may be overwritten. A row whose logits are not finite gets
    NO_TOKEN, since the model overflowed. native: for logits on the CPU. masks: of rows with grammars; rows
    whose mask failed or has not arrived get NO_TOKEN, too.
    """
    raw, no_sample = logits, []
    adjusted = [i for i, row in enumerate(rows) if needs_adjustment(row)]
    masked = [] if masks is None else masks.rows
    reports = any(rows[i].sampling.logprobs is not None for i in (*adjusted, *masked))
    if adjusted:
        logits = logits.float()
    if (adjusted or masked) and logits is raw and reports:
        raw = logits.clone()
    if adjusted:
        finite = logits[adjusted].amax(-1).isfinite().tolist()
        no_sample = [i for i, is_finite in zip(adjusted, finite, strict=True) if not is_finite]
        adjust_logits(logits, rows, eos_token_ids, masked)
    if masks is not None:
        ban_early_ends(masks, rows, eos_token_ids)
        logits = _mask(logits, masks) if native is None else native.mask(logits, masks)
    tokens = _choose_tokens(logits, rows) if native is None else native.choose(logits, rows)
    postponed = frozenset[int]() if masks is None else masks.postponed
    no_sample += postponed
    failures = {i: _NO_TOKEN_LEFT for i in adjusted if tokens[i] == NO_TOKEN and i not in no_sample}
    if masks is not None:
        failures |= masks.failures
    for i in (*no_sample, *failures):
        tokens[i] = NO_TOKEN
    queries = [
        (i, tokens[i], row.sampling.logprobs)
        for i, row in enumerate(rows)
        if row.sampling.logprobs is not None and tokens[i] != NO_TOKEN
    ]
    if not queries:
        return Sampled(tokens, None, failures, postponed)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    reported = report_logprobs(raw, queries) if native is None else native.report(raw, queries)
    for (i, _, _), one in zip(queries, reported, strict=True):
        logprobs[i] = one
    return Sampled(tokens, logprobs, failures, postponed)


def _mask(logits: torch.Tensor, masks: RowMasks) -> torch.Tensor:
    """The logits with minus infinity for tokens that masks do not allow; in place."""
    allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    for row, may in zip(masks.rows, allowed.view(bool), strict=True):
        logits[row].masked_fill_(torch.from_numpy(~may).to(logits.device), float("-inf"))
    return logits


def _choose_tokens(logits: torch.Tensor, rows: Sequence[RunningSequence]) -> list[int]:
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    finite = largest.squeeze(1).isfinite().tolist()
    tokens = [NO_TOKEN] * len(rows)
    methods = {"greedy": _greedy, "whole": _sample_from_all, "candidates": _sample_from_top}
    for name, method in methods.items():
        members = [i for i, row in enumerate(rows) if finite[i] and _method(row.sampling) == name]
        if not members:
            continue
        whole_batch = len(members) == len(rows)
        part, top = (logits, largest) if whole_batch else (logits[members], largest[members])
        for i, token in zip(members, method(part, top, [rows[i] for i in members]), strict=True):
            tokens[i] = token
    return tokens


def _method(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    return "candidates" if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else "whole"


def _greedy(logits: torch.Tensor, largest: torch.Tensor, rows: Sequence[RunningSequence]) -> list[int]:
    del largest, rows
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def _draws(rows: Sequence[RunningSequence], device: torch.device) -> torch.Tensor:
    draws = [uniform(row.seed, row.output_tokens) for row in rows]
    return torch.tensor(draws, dtype=torch.float64, device=device).unsqueeze(1)


def _inverse_temperatures(rows: Sequence[RunningSequence], device: torch.device) -> torch.Tensor:
    inverse = [1.0 / row.sampling.temperature for row in rows]
    return torch.tensor(inverse, dtype=torch.float32, device=device).unsqueeze(1)


def _search_cumulative(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [rows, 1] at which the cumulative weight exceeds the target, and the cumulative weight before it.

    weights: [rows, n], at least 0. The target is clamped to at least 0 and less than the sum, so that the
    weight at the index is positive.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.minimum(targets.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, targets, right=True)
    return index, cumulative.gather(1, index) - weights.gather(1, index)


def _sample_from_all(
    logits: torch.Tensor, largest: torch.Tensor, rows: Sequence[RunningSequence]
) -> list[int]:
    """Sample from the whole vocabulary: first a chunk by the sums of chunks, then a token in it."""
    weights = ((logits - largest) * _inverse_temperatures(rows, logits.device)).exp()
    missing = -weights.shape[1] % _CHUNK
    chunks = torch.nn.functional.pad(weights, (0, missing)).view(len(rows), -1, _CHUNK)
    sums = chunks.sum(-1, dtype=torch.float64)
    targets = _draws(rows, logits.device) * sums.sum(-1, keepdim=True)
    chunk, before = _search_cumulative(sums, targets)
    chosen = chunks[torch.arange(len(rows), device=logits.device), chunk.squeeze(1)]
    index, _ = _search_cumulative(chosen, targets - before)
    tokens: list[int] = (chunk * _CHUNK + index).squeeze(1).tolist()
    return tokens


def _sample_from_top(
    logits: torch.Tensor, largest: torch.Tensor, rows: Sequence[RunningSequence]
) -> list[int]:
    """Sample rows with top-k, top-p or min-p from the likeliest tokens, widened until they suffice."""
    vocab, device = logits.shape[1], logits.device
    inverse, draws = _inverse_temperatures(rows, device), _draws(rows, device)
    total = ((logits - largest) * inverse).exp().sum(-1, keepdim=True, dtype=torch.float64)
    tokens = [NO_TOKEN] * len(rows)
    waiting, width = list(range(len(rows))), min(CANDIDATES, vocab)
    while waiting:
        values, ids = _ranked(logits[waiting], width)
        weights = ((values - largest[waiting]) * inverse[waiting]).exp()
        kept = _keep_mask(weights, [rows[i].sampling for i in waiting], total[waiting])
        # Tokens beyond the candidates with the same logit as the last one would be kept, too.
        last = values.gather(1, kept.sum(-1, keepdim=True) - 1)
        top_k = torch.tensor([[rows[i].sampling.top_k] for i in waiting], device=device)
        complete = ((values[:, -1:] < last) & (top_k <= width)) | (width == vocab)
        ids, order = ids.sort(-1)
        weights = (weights * kept).gather(1, order)
        index, _ = _search_cumulative(
            weights, draws[waiting] * weights.sum(-1, keepdim=True, dtype=torch.float64)
        )
        picked = ids.gather(1, index).squeeze(1).tolist()
        for i, token, done in zip(waiting, picked, complete.squeeze(1).tolist(), strict=True):
            tokens[i] = token if done else NO_TOKEN
        waiting = [i for i in waiting if tokens[i] == NO_TOKEN]
        width = min(vocab, width * 8)
    return tokens


def _ranked(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest logits of each row and their ids, in order: equal ones by rising ids."""
    if width == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(width, dim=-1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep_mask(weights: torch.Tensor, params: Sequence[SamplingParams], total: torch.Tensor) -> torch.Tensor:
    """Which candidates remain: bool [rows, n], a prefix of each row.

    weights: in falling order, 1 for the likeliest. total: weight of all tokens. Top-k comes first, then
    top-p of the rest, and min-p relative to the likeliest.
    """
    device = weights.device
    limited = torch.tensor([[p.top_k > 0] for p in params], device=device)
    top_k = torch.tensor([[p.top_k] for p in params], device=device)
    top_p = torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64)
    min_p = torch.tensor([[p.min_p] for p in params], device=device)
    in_k = (torch.arange(weights.shape[1], device=device) < top_k) | ~limited
    likely = (weights * in_k).double()
    mass = likely.cumsum(-1)
    left = torch.where(limited, mass[:, -1:], total)
    in_p = (mass - likely < top_p * left) | (top_p >= 1)
    kept = in_k & in_p & (weights >= min_p) & (weights > 0)
    kept[:, 0] = True
    return kept


def report_logprobs(logits: torch.Tensor, queries: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
    """For each (row, token, n) the log-probability of the token, and the n likeliest tokens."""
    logprobs = logits[[row for row, _, _ in queries]].float().log_softmax(-1)
    token = torch.tensor([[token] for _, token, _ in queries], device=logits.device)
    values, ids = logprobs.topk(min(max(count for _, _, count in queries), logits.shape[1]))
    return [
        TokenLogprobs(token, own, tuple(zip(likeliest[:count], others[:count], strict=True)))
        for (_, token, count), [own], likeliest, others in zip(
            queries, logprobs.gather(1, token).tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
