"""Choosing the next token of each row of a step.

Draws are counter-based: one uniform number keyed by (seed, output position) is looked up in the
cumulative distribution of the remaining tokens. So a request's tokens do not depend on the other rows of
the batch, on preemptions or on prefix hits. Only rows that sample from the whole vocabulary read all of
it; rows with top-k, top-p or min-p look at the likeliest tokens first, and at more only if these do not
suffice.
"""

from collections.abc import Sequence

import torch

from shoal.core import NO_TOKEN, SamplingParams, TokenLogprobs, uniform
from shoal.execute.group import RunningSequence, TokenCounts

FIRST_CANDIDATES = 256
"""How many of the likeliest tokens a row with top-k, top-p or min-p looks at first."""


def sample(
    logits: torch.Tensor, rows: Sequence[RunningSequence], eos_token_ids: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """The next token of each row, and log-probabilities if a row wants them.

    logits: [rows, vocab], any float dtype; may be overwritten. A row whose logits are not finite gets
    NO_TOKEN: the model has overflowed, and any token would be arbitrary.
    """
    logits = logits.float()
    invalid = (~logits.amax(-1).isfinite()).nonzero().squeeze(1).tolist()
    logits[invalid] = 0.0
    raw = {i: logits[i].clone() for i, row in enumerate(rows) if row.sampling.logprobs is not None}
    for i, row in enumerate(rows):
        _adjust(logits[i], row, eos_token_ids)
    tokens = _choose(logits, rows)
    for i in invalid:
        tokens[i] = NO_TOKEN
        raw.pop(i, None)
    if not raw:
        return tokens, None
    return tokens, [
        _logprobs(raw[i], tokens[i], row.sampling.logprobs or 0) if i in raw else None
        for i, row in enumerate(rows)
    ]


def _adjust(logits: torch.Tensor, row: RunningSequence, eos_token_ids: Sequence[int]) -> None:
    """Apply penalties and the ban on early ends to one row [vocab], in place."""
    params = row.sampling
    if params.penalised:
        counts = row.penalty
        if counts is None:
            counts = row.penalty = _count(row, logits)
        _penalise(logits, counts, params)
    if row.output_tokens < params.min_tokens:
        banned = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        logits[[t for t in banned if t < len(logits)]] = float("-inf")


def _count(row: RunningSequence, logits: torch.Tensor) -> TokenCounts:
    vocab, device = len(logits), logits.device
    tokens = torch.tensor(row.tokens, dtype=torch.int64, device=device)
    seen = torch.zeros(vocab, dtype=torch.bool, device=device)
    seen[tokens] = True
    output = torch.bincount(tokens[row.prompt_tokens :], minlength=vocab).to(torch.int32)
    return TokenCounts(seen, output)


def _penalise(logits: torch.Tensor, counts: TokenCounts, params: SamplingParams) -> None:
    if params.repetition_penalty != 1.0:
        seen = logits[counts.seen]
        logits[counts.seen] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )
    if params.frequency_penalty != 0.0:
        logits -= params.frequency_penalty * counts.output
    if params.presence_penalty != 0.0:
        logits -= params.presence_penalty * (counts.output > 0)


def _choose(logits: torch.Tensor, rows: Sequence[RunningSequence]) -> list[int]:
    kinds: dict[tuple[str, int], list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(_kind(row.sampling), []).append(i)
    tokens = [0] * len(rows)
    for (kind, width), members in kinds.items():
        part = logits if len(members) == len(rows) else logits[members]
        chosen = [rows[i] for i in members]
        if kind == "greedy":
            picked = part.argmax(-1).tolist()
        elif kind == "whole":
            picked = _from_whole(part, chosen)
        else:
            picked = _from_candidates(part, chosen, min(width, logits.shape[1]))
        for i, token in zip(members, picked, strict=True):
            tokens[i] = token
    return tokens


def _kind(params: SamplingParams) -> tuple[str, int]:
    """How a row is sampled, and among how many candidates at first.

    It depends on this row alone, because the number determines the order of equally likely tokens.
    """
    if params.greedy:
        return "greedy", 0
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        return "candidates", max(FIRST_CANDIDATES, params.top_k)
    return "whole", 0


def _draws(rows: Sequence[RunningSequence], device: torch.device) -> torch.Tensor:
    draws = [uniform(row.seed, row.output_tokens) for row in rows]
    return torch.tensor(draws, dtype=torch.float64, device=device).unsqueeze(1)


def _scaled(logits: torch.Tensor, rows: Sequence[RunningSequence]) -> torch.Tensor:
    """Logits divided by temperature, with 0 for the likeliest token, so that nothing overflows."""
    temperatures = [row.sampling.temperature for row in rows]
    divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def _look_up(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index at which the cumulative weight exceeds the draw; weights [rows, n] >= 0, not normalised."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)


def _from_whole(logits: torch.Tensor, rows: Sequence[RunningSequence]) -> list[int]:
    scaled = _scaled(logits, rows)
    tokens: list[int] = _look_up(scaled.softmax(-1), _draws(rows, logits.device)).squeeze(1).tolist()
    return tokens


def _from_candidates(logits: torch.Tensor, rows: Sequence[RunningSequence], width: int) -> list[int]:
    """Sample rows with top-k, top-p or min-p from the ``width`` likeliest tokens, and from more where needed.

    No row's top-k is larger than ``width``.
    """
    scaled = _scaled(logits, rows)
    vocab = logits.shape[1]
    total = scaled.logsumexp(-1, keepdim=True)
    draws = _draws(rows, logits.device)
    tokens = [-1] * len(rows)
    open_rows = list(range(len(rows)))
    while open_rows:
        values, ids = scaled[open_rows].topk(width, dim=-1)
        weights = (values - total[open_rows]).exp()
        kept, complete = _cut(weights, [rows[i].sampling for i in open_rows], width == vocab)
        picked = ids.gather(1, _look_up(weights * kept, draws[open_rows])).squeeze(1).tolist()
        for i, token, done in zip(open_rows, picked, complete, strict=True):
            tokens[i] = token if done else -1
        open_rows = [i for i in open_rows if tokens[i] < 0]
        width = min(vocab, width * 8)
    return tokens


def _cut(
    weights: torch.Tensor, params: Sequence[SamplingParams], whole: bool
) -> tuple[torch.Tensor, list[bool]]:
    """Which of the candidates remain (bool [rows, n]), and whether no token beyond them could.

    weights: probabilities in falling order. First top-k, then top-p of the rest, and min-p relative to the
    likeliest. whole: the candidates are the whole vocabulary.
    """
    width, device = weights.shape[1], weights.device
    limited = torch.tensor([[p.top_k > 0] for p in params], device=device)
    top_k = torch.tensor([[p.top_k] for p in params], device=device)
    top_p = torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64)
    min_p = torch.tensor([[p.min_p] for p in params], device=device)
    in_k = (torch.arange(width, device=device) < top_k) | ~limited
    likely = (weights * in_k).double()
    mass = likely.cumsum(-1)
    left = torch.where(limited, mass[:, -1:], 1.0)
    kept = in_k & (mass - likely < top_p * left) & (weights >= min_p * weights[:, :1])
    kept[:, 0] = True
    complete = ~kept[:, -1:] | limited if not whole else torch.ones_like(limited)
    return kept, complete.squeeze(1).tolist()


def _logprobs(raw: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    logprobs = raw.log_softmax(-1)
    values, ids = logprobs.topk(top)
    return TokenLogprobs(
        token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
    )
