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

from shoal.core import NO_TOKEN, Failure, FinishReason, TokenLogprobs, uniform
from shoal.execute.grammar.masks import RowMasks
from shoal.execute.sampling.adjust_logits import adjust_logits, ban_early_ends, needs_adjustment
from shoal.execute.sampling.choose import choose, choose_incomplete
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sequences import RunningSequence

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
    params = [row.sampling for row in rows]
    draws = [uniform(row.seed, row.output_tokens) for row in rows]
    tokens: list[int] = choose(logits, params, draws).tolist()
    return choose_incomplete(logits, params, draws, tokens)


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
