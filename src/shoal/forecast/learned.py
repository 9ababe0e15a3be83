"""Output lengths learned online from prompts.

UELLM (He et al., section 4.1) sorts requests into buckets of output length by a fine-tuned language model,
and a monitor corrects those that outgrow their bucket. Here the classifier is linear in hashed features of
the prompt's tokens: it answers in a fraction of a millisecond and learns from the service's own requests.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError, Request, SyntheticPrompt
from shoal.forecast.draws import Seeds, derive_seeds

Columns = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

FIRST_BOUND = 16
COLUMNS = 1 << 13
"""Less than 10,000, where OpenBLAS begins to call other threads: on a busy machine a lesson would wait for
them for a hundred milliseconds."""
EDGE_TOKENS = 4
READ_TOKENS = 256
"""Of a long prompt, so many tokens at its start and at its end are read: a question stands in one of them."""

_TOKEN, _PAIR, _FROM_START, _FROM_END, _LENGTH, _LIMIT = (
    np.array([kind], dtype=np.uint64) for kind in range(1, 7)
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How often the right bucket was foreseen among the last ``samples`` finished requests.

    hits: of how many requests. majority: how many had the bucket that was commonest among them, which is
    what a constant guess, chosen afterwards, would have hit.
    """

    hits: int
    majority: int
    samples: int

    @property
    def hit_rate(self) -> float:
        """Share of requests whose bucket was foreseen; 0 before the first."""
        return self.hits / max(1, self.samples)

    @property
    def majority_share(self) -> float:
        """Share of requests in the commonest bucket; 0 before the first."""
        return self.majority / max(1, self.samples)


class LearnedLengths:
    """One service's requests sorted into buckets of output length by what their prompts say.

    Buckets end at 16, 32, 64, ... tokens, the last at ``maximum``. ``batch`` finished requests are learned
    at once; before the first lesson a request is believed to reach its ceiling. The learner is a linear
    one-vs-all classifier with hinge loss and a constant rate, so that it never ceases to follow its traffic.
    A feature weighs as much as the share of requests without it: what a chat template puts into every prompt
    says nothing. The same requests in the same order give the same predictions.

    maximum: longest output that the service allows. window: how many finished requests ``accuracy`` covers.
    bounds: last output length of each bucket. corrections: how often a request outgrew its prediction.
    """

    def __init__(self, maximum: int, *, batch: int = 8, window: int = 200) -> None:
        for name, value in (("maximum", maximum), ("batch", batch), ("window", window)):
            if value < 1:
                raise ConfigError(f"{name} of the learned length predictor must be at least 1, got {value}")
        self.bounds = _geometric_bounds(maximum)
        self.corrections = 0
        self._batch = batch
        self._lessons: list[tuple[Columns, int]] = []
        self._requests = 0
        self._with_feature = np.zeros(COLUMNS)
        self._outcomes: deque[tuple[bool, int]] = deque(maxlen=window)
        self._classifier = _new_classifier()
        self._taught = False

    def bucket_of(self, tokens: int) -> int:
        """Number of the bucket with outputs of so many tokens; the last also takes what is longer."""
        return min(bisect_left(self.bounds, tokens), len(self.bounds) - 1)

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        """Last length of the bucket the request is believed to be in; once outgrown, of the next."""
        if generated > 0:
            self.corrections += 1
            place = bisect_right(self.bounds, generated)
            bound = self.bounds[place] if place < len(self.bounds) else ceiling
        elif self._taught:
            bound = self.bounds[self._believed(_columns_of(request))]
        else:
            bound = ceiling
        return min(bound, ceiling)

    def record(self, request: Request, output_tokens: int) -> None:
        """Learn that the request ended with ``output_tokens``; what was believed is judged first."""
        columns, bucket = _columns_of(request), self.bucket_of(output_tokens)
        believed = self._believed(columns) if self._taught else len(self.bounds) - 1
        if request.sampling.max_tokens is not None:
            believed = min(believed, self.bucket_of(request.sampling.max_tokens))
        self._outcomes.append((believed == bucket, bucket))
        self._requests += 1
        self._with_feature[columns] += 1
        self._lessons.append((columns, bucket))
        if len(self._lessons) == self._batch:
            self._teach()

    @property
    def accuracy(self) -> Accuracy:
        """Of the belief just before each of the last finished requests was learned."""
        buckets = Counter(bucket for _, bucket in self._outcomes)
        return Accuracy(
            hits=sum(hit for hit, _ in self._outcomes),
            majority=max(buckets.values(), default=0),
            samples=len(self._outcomes),
        )

    def _believed(self, columns: Columns) -> int:
        """The bucket with the highest score, as the classifier's ``predict``, at a tenth of its time."""
        weights = self._classifier.coef_
        scores = weights[:, columns] @ self._values(columns) + self._classifier.intercept_
        if len(scores) == 1:  # scikit-learn keeps one row of weights for two classes
            return int(scores[0] > 0)
        return int(scores.argmax())

    def _teach(self) -> None:
        """One mini-batch for the classifier."""
        if len(self.bounds) > 1:
            rows = [(columns, self._values(columns)) for columns, _ in self._lessons]
            buckets = [bucket for _, bucket in self._lessons]
            self._classifier.partial_fit(_matrix(rows), buckets, classes=np.arange(len(self.bounds)))
            self._taught = True
        self._lessons.clear()

    def _values(self, columns: Columns) -> Values:
        """Weights of the features present, scaled to unit length: long prompts shout no louder."""
        values = 1.0 - self._with_feature[columns] / (self._requests + 1)
        unit: Values = values / np.linalg.norm(values)
        return unit


def _geometric_bounds(maximum: int) -> tuple[int, ...]:
    bounds = []
    bound = FIRST_BOUND
    while bound < maximum:
        bounds.append(bound)
        bound *= 2
    return (*bounds, maximum)


def _new_classifier() -> Any:
    # Imported here because it takes a second, which only those who chose this predictor should pay.
    from sklearn.linear_model import SGDClassifier

    return SGDClassifier(loss="hinge", penalty=None, learning_rate="constant", eta0=1.0, random_state=0)


def _matrix(rows: Sequence[tuple[Columns, Values]]) -> Any:
    """Sparse matrix [requests, COLUMNS] of the features present in each row, and their values."""
    from scipy.sparse import csr_matrix

    starts = np.concatenate(([0], np.cumsum([len(columns) for columns, _ in rows])))
    columns = np.concatenate([columns for columns, _ in rows])
    values = np.concatenate([values for _, values in rows])
    return csr_matrix((values, columns, starts), shape=(len(rows), COLUMNS))


def _columns_of(request: Request) -> Columns:
    """Columns of the request's features, ascending and once each; a synthetic prompt has only its length."""
    prompt, limit = request.prompt, request.sampling.max_tokens
    # Two bins in every doubling of the prompt's length, one in every doubling of max_tokens.
    hashes = [derive_seeds(_LENGTH, np.array([int(2 * np.log2(max(1, len(prompt))))]))]
    if limit is not None:
        hashes.append(derive_seeds(_LIMIT, np.array([limit.bit_length()])))
    if not isinstance(prompt, SyntheticPrompt):
        hashes += _token_hashes(prompt)
    columns: Columns = np.unique(np.concatenate(hashes) & np.uint64(COLUMNS - 1)).astype(np.int64)
    return columns


def _token_hashes(prompt: Sequence[int]) -> list[Seeds]:
    """Tokens, neighbouring pairs, and the first and last few with their positions."""
    if len(prompt) > 2 * READ_TOKENS:
        prompt = [*prompt[:READ_TOKENS], *prompt[-READ_TOKENS:]]
    tokens = np.asarray(prompt, dtype=np.uint64)
    edge = np.arange(min(EDGE_TOKENS, len(tokens)))
    return [
        derive_seeds(_TOKEN, tokens),
        derive_seeds(derive_seeds(_PAIR, tokens[:-1]), tokens[1:]),
        derive_seeds(derive_seeds(_FROM_START, edge), tokens[: len(edge)]),
        derive_seeds(derive_seeds(_FROM_END, edge), tokens[::-1][: len(edge)]),
    ]
