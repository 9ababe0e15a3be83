"""SCLS's serving time of a padded batch: bilinear in batch size and length (Cheng et al., section 4.2)."""

from dataclasses import dataclass
from typing import TypeVar

from shoal.forecast.latency import FloatArray, LatencyModel, require_cost

Size = TypeVar("Size", float, FloatArray)
"""A batch size, or an array of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bilinear:
    """Seconds as product * N * l + sequence * N + length * l + constant (the paper's coefficients 1 to 4)."""

    product: float
    sequence: float
    length: float
    constant: float

    def __post_init__(self) -> None:
        """Refuse costs that are negative or not finite; raises ConfigError."""
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
    """The paper's Eqs. 3 and 4, and their sum over a slice.

    prefill: of a batch of N prompts padded to L tokens. decode: of one iteration in which each of N rows
    attends l positions, its new token among them.
    """

    prefill: Bilinear
    decode: Bilinear

    def serve(self, sequences: Size, length: float, tokens: int) -> Size:
        """Seconds for N = ``sequences`` prompts padded to L = ``length`` to generate S = ``tokens`` each.

        The prefill samples the first token, so S - 1 decode iterations follow, at l = L + 1 .. L + S - 1.
        (The paper's Eq. 2 sums one more, to L + S, as if the prefill sampled nothing.)
        """
        decodes = tokens - 1
        lengths = decodes * length + decodes * tokens / 2
        decode = self.decode
        per_sequence = decode.product * lengths + decode.sequence * decodes
        shared = decode.length * lengths + decode.constant * decodes
        return self.prefill.time(sequences, length) + per_sequence * sequences + shared

    @classmethod
    def from_linear(cls, model: LatencyModel, longest: int) -> "PaddedLatency":
        """The padded special case of a step model, for prompts up to ``longest`` tokens.

        Decoding is exact. Attention makes a prefill quadratic in L, which no bilinear form is: L^2 is
        replaced by the multiple of L with the least squared error over [0, longest], 3/4 longest * L. That
        keeps every coefficient non-negative, overestimates below 3/4 longest and underestimates above.
        """
        per_token = model.token_s + model.work_s * (0.75 * longest + 1) / 2
        return cls(
            prefill=Bilinear(
                product=per_token, sequence=model.sequence_s, length=0.0, constant=model.constant_s
            ),
            decode=Bilinear(
                product=model.context_s,
                sequence=model.sequence_s + model.token_s,
                length=0.0,
                constant=model.constant_s,
            ),
        )
