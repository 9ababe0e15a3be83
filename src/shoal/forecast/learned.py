"""Output-length predictor learned online from prompts: a linear classifier of length buckets.

UELLM (He et al., section 4.1) classifies requests into buckets of output length with a fine-tuned language
model, and a monitor corrects those that outgrow their bucket. Here the classifier is linear in hashed
features of the prompt's tokens: it takes a fraction of a millisecond, and learns from the service's own
requests.
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
"""Longest output in the first bucket."""
COLUMNS = 1 << 13
"""Number of hashed features. Below 10,000, since OpenBLAS uses more threads from there, which delay a
training step by a hundred milliseconds on a busy machine."""
EDGE_TOKENS = 4
"""How many of the first and last tokens are features with their positions."""
READ_TOKENS = 256
"""How many tokens at the start and end of a long prompt are read: one of them usually has the question."""

_TOKEN, _PAIR, _FROM_START, _FROM_END, _LENGTH, _LIMIT = (
    np.array([kind], dtype=np.uint64) for kind in range(1, 7)
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of predicted buckets over finished requests."""

    hits: int
    """Correct predictions."""
    majority: int
    """Requests in the most frequent bucket: the hits of the best constant prediction."""
    samples: int

    @property
    def hit_rate(self) -> float:
        """0 without samples."""
        return self.hits / max(1, self.samples)

    @property
    def majority_share(self) -> float:
        """0 without samples."""
        return self.majority / max(1, self.samples)


class LearnedLengths:
    """Predicts the bucket of a request's output length from its prompt, for one service.

    Buckets end at 16, 32, 64, ... tokens, the last at ``maximum``. The classifier is trained on batches of
    finished requests; before the first batch, the prediction is ``max_new_tokens``. It is linear, one-vs-all,
    with hinge loss and a constant learning rate, so that it adapts to changing traffic. The weight of a
    feature is the share of requests without it, so the text of a chat template has none. The same requests in
    the same order give the same predictions.

    maximum: longest output that the service allows. batch: finished requests per training step. window:
    finished requests that ``accuracy`` covers.
    """

    def __init__(self, maximum: int, *, batch: int = 8, window: int = 200) -> None:
        for name, value in (("maximum", maximum), ("batch", batch), ("window", window)):
            if value < 1:
                raise ConfigError(f"{name} of the learned length predictor must be at least 1, got {value}")
        self.bounds = _geometric_bounds(maximum)
        """Longest output of each bucket."""
        self.corrections = 0
        """Number of times that a request outgrew its prediction."""
        self._batch = batch
        self._samples: list[tuple[Columns, int]] = []  # (features, bucket) for the next training step
        self._requests = 0
        self._with_feature = np.zeros(COLUMNS)  # requests that have each feature
        self._outcomes: deque[tuple[bool, int]] = deque(maxlen=window)  # (predicted correctly, bucket)
        self._classifier = _new_classifier()
        self._trained = False

    def bucket_of(self, tokens: int) -> int:
        """Index of the bucket of an output length; the last bucket includes longer outputs."""
        return min(bisect_left(self.bounds, tokens), len(self.bounds) - 1)

    def predict(self, request: Request, generated: int, max_new_tokens: int) -> int:
        """Upper end of the predicted bucket; for a request that has outgrown it, of the next bucket."""
        if generated > 0:
            self.corrections += 1
            bucket = bisect_right(self.bounds, generated)
            length = self.bounds[bucket] if bucket < len(self.bounds) else max_new_tokens
        elif self._trained:
            length = self.bounds[self._classify(_columns_of(request))]
        else:
            length = max_new_tokens
        return min(length, max_new_tokens)

    def record(self, request: Request, output_tokens: int) -> None:
        """Count the accuracy of the prediction for a finished request, then learn from it."""
        columns, bucket = _columns_of(request), self.bucket_of(output_tokens)
        predicted = self._classify(columns) if self._trained else len(self.bounds) - 1
        if request.sampling.max_tokens is not None:
            predicted = min(predicted, self.bucket_of(request.sampling.max_tokens))
        self._outcomes.append((predicted == bucket, bucket))
        self._requests += 1
        self._with_feature[columns] += 1
        self._samples.append((columns, bucket))
        if len(self._samples) == self._batch:
            self._train()

    @property
    def accuracy(self) -> Accuracy:
        """Accuracy of predictions for the last finished requests, made before learning from each."""
        buckets = Counter(bucket for _, bucket in self._outcomes)
        return Accuracy(
            hits=sum(hit for hit, _ in self._outcomes),
            majority=max(buckets.values(), default=0),
            samples=len(self._outcomes),
        )

    def _classify(self, columns: Columns) -> int:
        """The bucket with the highest score; as ``classifier.predict`` in a tenth of the time."""
        weights = self._classifier.coef_
        scores = weights[:, columns] @ self._values(columns) + self._classifier.intercept_
        if len(scores) == 1:  # scikit-learn keeps one row of weights for two classes
            return int(scores[0] > 0)
        return int(scores.argmax())

    def _train(self) -> None:
        if len(self.bounds) > 1:
            rows = [(columns, self._values(columns)) for columns, _ in self._samples]
            buckets = [bucket for _, bucket in self._samples]
            self._classifier.partial_fit(_matrix(rows), buckets, classes=np.arange(len(self.bounds)))
            self._trained = True
        self._samples.clear()

    def _values(self, columns: Columns) -> Values:
        """Weights of the present features, scaled to unit length, so that long prompts do not count more."""
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
    # A slow import, needed only for this predictor.
    from sklearn.linear_model import SGDClassifier

    return SGDClassifier(loss="hinge", penalty=None, learning_rate="constant", eta0=1.0, random_state=0)


def _matrix(rows: Sequence[tuple[Columns, Values]]) -> Any:
    """Sparse matrix [requests, COLUMNS] from the present features and values of each row."""
    from scipy.sparse import csr_matrix

    starts = np.concatenate(([0], np.cumsum([len(columns) for columns, _ in rows])))
    columns = np.concatenate([columns for columns, _ in rows])
    values = np.concatenate([values for _, values in rows])
    return csr_matrix((values, columns, starts), shape=(len(rows), COLUMNS))


def _columns_of(request: Request) -> Columns:
    """Distinct, sorted columns of the request's features; of a synthetic prompt, only its length."""
    prompt, limit = request.prompt, request.sampling.max_tokens
    # Two bins per doubling of the prompt's length, one per doubling of max_tokens.
    hashes = [derive_seeds(_LENGTH, np.array([int(2 * np.log2(max(1, len(prompt))))]))]
    if limit is not None:
        hashes.append(derive_seeds(_LIMIT, np.array([limit.bit_length()])))
    if not isinstance(prompt, SyntheticPrompt):
        hashes += _token_hashes(prompt)
    columns: Columns = np.unique(np.concatenate(hashes) & np.uint64(COLUMNS - 1)).astype(np.int64)
    return columns


def _token_hashes(prompt: Sequence[int]) -> list[Seeds]:
    """Tokens, pairs of adjacent tokens, and the first and last tokens with their positions."""
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
