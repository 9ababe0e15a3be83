"""What requests ask of their prompts: log-probabilities of the tokens, and embeddings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.core import PromptLogprobs, StepPlan, TokenLogprobs
from shoal.execute.model.transformers_forward import Forward
from shoal.execute.sequences import RunningSequence

Report = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], list[TokenLogprobs]]
"""For logits and each (row, token, n): the log-probability of the token, and the n likeliest tokens."""

_PIECE_LOGITS = 2**24
"""Logits that are computed at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What one step tells of prompts, by row of the plan."""

    logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """As in ``StepResult``."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """As in ``StepResult``."""


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


@dataclass(frozen=True, slots=True)
class PromptOutputRequest:
    """What the rows of one step ask."""

    scored: Sequence[ScoredRow]
    """Rows that score prompt tokens."""
    embedded: Sequence[tuple[int, int]]
    """(which of the rows that sample, its place in the plan) of those that want an embedding."""

    @classmethod
    def of(
        cls, plan: StepPlan, rows: Sequence[RunningSequence], last: np.ndarray, computed: np.ndarray
    ) -> "PromptOutputRequest":
        """What ``rows`` ask in a step of ``plan``.

        last: places of each row's last token in the step. computed: tokens with KV so far, by slot.
        """
        embedded = [
            (which, row)
            for which, row in enumerate(plan.sampled)
            if rows[row].sampling.embed and rows[row].output_tokens == 0
        ]
        return cls(_scored_rows(rows, plan.new_tokens, last, computed), embedded)

    @property
    def nothing(self) -> bool:
        """Whether nobody asks anything."""
        return not self.scored and not self.embedded

    def places(self, last: np.ndarray) -> np.ndarray:
        """Places in the step of all hidden states needed; last: those of the rows that sample."""
        return np.concatenate([last, *[row.places for row in self.scored]])

    def answer(
        self, hidden: torch.Tensor, sampled: int, forward: Forward, vocab_size: int, report: Report
    ) -> PromptOutputs:
        """The answers. hidden: states at ``places``, the first ``sampled`` of them of rows that sample."""
        embeddings = {row: _embedding(hidden[which]) for which, row in self.embedded}
        asked = [one for row in self.scored for one in row.asked()]
        size = max(1, _PIECE_LOGITS // vocab_size)
        entries: list[TokenLogprobs] = []
        for start in range(0, len(asked), size):
            logits = forward.logits(hidden[sampled:][start : start + size])
            entries += _score(logits, asked[start : start + size], report)
        logprobs = {}
        for row in self.scored:
            count = len(row.places)
            logprobs[row.row] = PromptLogprobs(row.first, entries[:count])
            del entries[:count]
        return PromptOutputs(logprobs, embeddings)


def _scored_rows(
    rows: Sequence[RunningSequence], new_tokens: Sequence[int], last: np.ndarray, computed: np.ndarray
) -> list[ScoredRow]:
    """They score behind all tokens that they compute but the last of the prompt."""
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


def _score(logits: torch.Tensor, asked: Sequence[tuple[int, int]], report: Report) -> list[TokenLogprobs]:
    tokens = torch.tensor([[token] for token, _ in asked], device=logits.device)
    ranks = ((logits > logits.gather(1, tokens)).sum(-1) + 1).tolist()
    reported = report(logits, [(row, token, count) for row, (token, count) in enumerate(asked)])
    return [
        TokenLogprobs(one.token, one.logprob, one.top, rank)
        for one, rank in zip(reported, ranks, strict=True)
    ]


def _embedding(hidden: torch.Tensor) -> bytes:
    """A hidden state [hidden size] as a vector of length 1: float32, little-endian."""
    vector = torch.nn.functional.normalize(hidden.float(), dim=0)
    return vector.cpu().numpy().astype("<f4").tobytes()
