"""Prompt outputs: log-probabilities of prompt tokens (``prompt_logprobs``), and embeddings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.core import PromptLogprobs, StepPlan, TokenLogprobs
from shoal.execute.model.transformers_forward import Forward
from shoal.execute.sequences import RunningSequence

ReportLogprobs = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], list[TokenLogprobs]]
"""From logits and (row, token, n): the log-probability of each token, and the n likeliest tokens."""

_MAX_LOGITS = 2**24
"""Most logits that are computed at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """Prompt outputs of one step, by row of the plan; as in ``StepResult``."""

    logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of a step whose prompt tokens are scored."""

    row: int
    sequence: RunningSequence
    first: int
    """Position in the prompt of the first scored token."""
    token_indices: np.ndarray
    """Indices in the batch of the tokens before the scored ones, int64."""

    def queries(self) -> Iterator[tuple[int, int]]:
        """(token, number of likeliest tokens) for each scored token."""
        count = self.sequence.sampling.prompt_logprobs or 0
        for token in self.sequence.tokens[self.first : self.first + len(self.token_indices)]:
            yield token, count


@dataclass(frozen=True, slots=True)
class PromptOutputRequest:
    """The prompt outputs that the rows of one step request."""

    scored: Sequence[ScoredRow]
    embedded: Sequence[tuple[int, int]]
    """(index among the sampling rows, index in the plan) of rows that request an embedding."""

    @classmethod
    def of(
        cls, plan: StepPlan, rows: Sequence[RunningSequence], last: np.ndarray, computed: np.ndarray
    ) -> "PromptOutputRequest":
        """The prompt outputs that ``rows`` request in a step of ``plan``.

        last: index in the batch of each row's last token. computed: tokens with KV so far, by slot.
        """
        embedded = [
            (which, row)
            for which, row in enumerate(plan.sampled)
            if rows[row].sampling.embed and rows[row].output_tokens == 0
        ]
        return cls(_scored_rows(rows, plan.new_tokens, last, computed), embedded)

    @property
    def empty(self) -> bool:
        """Whether no row requests prompt outputs."""
        return not self.scored and not self.embedded

    def token_indices(self, last: np.ndarray) -> np.ndarray:
        """Indices in the batch of all hidden states needed; last: those of the sampling rows."""
        return np.concatenate([last, *[row.token_indices for row in self.scored]])

    def compute(
        self, hidden: torch.Tensor, sampled: int, forward: Forward, vocab_size: int, report: ReportLogprobs
    ) -> PromptOutputs:
        """Compute the outputs. hidden: states at ``token_indices``, the first ``sampled`` of them of
        sampling rows."""
        embeddings = {row: _embedding(hidden[which]) for which, row in self.embedded}
        queries = [query for row in self.scored for query in row.queries()]
        size = max(1, _MAX_LOGITS // vocab_size)
        entries: list[TokenLogprobs] = []
        for start in range(0, len(queries), size):
            logits = forward.logits(hidden[sampled:][start : start + size])
            entries += _score(logits, queries[start : start + size], report)
        logprobs = {}
        for row in self.scored:
            count = len(row.token_indices)
            logprobs[row.row] = PromptLogprobs(row.first, entries[:count])
            del entries[:count]
        return PromptOutputs(logprobs, embeddings)


def _scored_rows(
    rows: Sequence[RunningSequence], new_tokens: Sequence[int], last: np.ndarray, computed: np.ndarray
) -> list[ScoredRow]:
    """Rows with scored tokens: all computed prompt tokens but the last score the token after them."""
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


def _score(
    logits: torch.Tensor, queries: Sequence[tuple[int, int]], report: ReportLogprobs
) -> list[TokenLogprobs]:
    tokens = torch.tensor([[token] for token, _ in queries], device=logits.device)
    ranks = ((logits > logits.gather(1, tokens)).sum(-1) + 1).tolist()
    reported = report(logits, [(row, token, count) for row, (token, count) in enumerate(queries)])
    return [
        TokenLogprobs(one.token, one.logprob, one.top, rank)
        for one, rank in zip(reported, ranks, strict=True)
    ]


def _embedding(hidden: torch.Tensor) -> bytes:
    """A hidden state [hidden size] as a vector of length 1: float32, little-endian."""
    vector = torch.nn.functional.normalize(hidden.float(), dim=0)
    return vector.cpu().numpy().astype("<f4").tobytes()
