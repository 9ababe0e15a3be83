"""Log-probabilities of prompt tokens, for rows of a step that want them: a piece of the logits at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import PromptLogprobs, TokenLogprobs
from shoal.execute.group import RunningSequence
from shoal.execute.interface import Forward

Report = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], list[TokenLogprobs]]
"""For logits and each (row, token, n): the log-probability of the token, and the n likeliest tokens."""

_PIECE_LOGITS = 2**24
"""Logits that are computed at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of a step that computes prompt tokens before others whose log-probabilities are wanted."""

    row: int
    """Its place in the plan."""
    sequence: RunningSequence
    """Whose prompt it is."""
    first: int
    """Place in the prompt of the first token to be scored."""
    places: np.ndarray
    """Places in the step of the tokens before those to be scored, int64."""

    def asked(self) -> Iterator[tuple[int, int]]:
        """(token, how many of the likeliest) for each of ``places``."""
        count = self.sequence.sampling.prompt_logprobs or 0
        for token in self.sequence.tokens[self.first : self.first + len(self.places)]:
            yield token, count


def scored_rows(
    rows: Sequence[RunningSequence], new_tokens: Sequence[int], last: np.ndarray, computed: np.ndarray
) -> list[ScoredRow]:
    """The rows of a step that score prompt tokens: behind all that they compute but the last of the prompt.

    last: places of each row's last token in the step. computed: tokens with KV so far, by slot.
    """
    found = []
    for at, row in enumerate(rows):
        if row.sampling.prompt_logprobs is None:
            continue
        begin = int(last[at]) + 1 - new_tokens[at]
        position = int(computed[row.slot])
        count = min(new_tokens[at], row.prompt_tokens - 1 - position)
        if count > 0:
            found.append(ScoredRow(at, row, position + 1, np.arange(begin, begin + count)))
    return found


def score(
    scored: Sequence[ScoredRow], hidden: torch.Tensor, forward: Forward, vocab_size: int, report: Report
) -> dict[int, PromptLogprobs]:
    """Log-probabilities by row. hidden: of all their ``places``, one row after the other."""
    asked = [one for row in scored for one in row.asked()]
    size = max(1, _PIECE_LOGITS // vocab_size)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(asked), size):
        piece = asked[start : start + size]
        entries += _score(forward.logits(hidden[start : start + size]), piece, report)
    results = {}
    for row in scored:
        count = len(row.places)
        results[row.row] = PromptLogprobs(row.first, entries[:count])
        del entries[:count]
    return results


def _score(logits: torch.Tensor, asked: Sequence[tuple[int, int]], report: Report) -> list[TokenLogprobs]:
    tokens = torch.tensor([[token] for token, _ in asked], device=logits.device)
    ranks = ((logits > logits.gather(1, tokens)).sum(-1) + 1).tolist()
    reported = report(logits, [(row, token, count) for row, (token, count) in enumerate(asked)])
    return [
        TokenLogprobs(one.token, one.logprob, one.top, rank)
        for one, rank in zip(reported, ranks, strict=True)
    ]


def embedding(hidden: torch.Tensor) -> bytes:
    """A hidden state [hidden size] as a vector of length 1: float32, little-endian."""
    vector = torch.nn.functional.normalize(hidden.float(), dim=0)
    return vector.cpu().numpy().astype("<f4").tobytes()
