"""SCLS's latency model of padded batches: bilinear in batch size and length (Cheng et al., section 4.2)."""

from dataclasses import dataclass
from typing import TypeVar

from shoal.forecast.latency import FloatArray, require_cost

Size = TypeVar("Size", float, FloatArray)
"""A batch size, or an array of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bilinear:
    """Seconds as product * N * l + sequence * N + length * l + constant, for N rows of length l.

    The paper's coefficients 1 to 4. Raises ConfigError for costs that are negative or not finite.
    """

    product: float
    sequence: float
    length: float
    constant: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require_cost(name, getattr(self, name))

    def time(self, sequences: Size, length: float) -> Size:
        """Seconds of one iteration over ``sequences`` rows of ``length``."""
        return (
            self.product * length * sequences
            + self.sequence * sequences
            + (self.length * length + self.constant)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedLatency:
    """The paper's Eqs. 3 and 4, and their sum over a slice."""

    prefill: Bilinear
    """For N prompts padded to L tokens."""
    decode: Bilinear
    """For one iteration in which each of N rows attends l positions, including its new token."""

    def serve(self, sequences: Size, length: float, tokens: int) -> Size:
        """Seconds for N = ``sequences`` prompts padded to L = ``length`` that generate S = ``tokens`` each.

        The prefill samples the first token, so S - 1 decode iterations follow, with l = L + 1 .. L + S - 1.
        (The paper's Eq. 2 sums one more, to L + S, as if the prefill sampled no token.)
        """
        decodes = tokens - 1
        lengths = decodes * length + decodes * tokens / 2
        decode = self.decode
        per_sequence = decode.product * lengths + decode.sequence * decodes
        shared = decode.length * lengths + decode.constant * decodes
        return self.prefill.time(sequences, length) + per_sequence * sequences + shared
