"""Estimates of a static batch: serving time, and whether it fits in memory."""

from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError


class ServingTime(Protocol):
    """Time to serve a padded batch (SCLS, section 4.2)."""

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        """Seconds for prefill and all ``iterations`` of ``sequences`` rows padded to ``input_tokens``."""
        ...


class MemoryLimit(Protocol):
    """Whether a padded batch can be served without running out of memory (SCLS, section 4.3)."""

    def fits(self, sequences: int, input_tokens: int, iterations: int, /) -> bool:
        """Whether the batch fits. Must be monotone in all arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByBytes:
    """(input + iterations) x rows x bytes per token, within a share of the memory (SCLS, equation 9).

    Raises ConfigError for numbers out of range.
    """

    token_bytes: int
    """KV of one token in all layers."""
    available_bytes: int
    """Free memory besides weights and engine."""
    zeta: float = 0.9
    """Usable share of ``available_bytes``; the rest is lost to fragmentation."""

    def __post_init__(self) -> None:
        if self.token_bytes < 1 or self.available_bytes < 1:
            raise ConfigError(
                f"memory of static batches needs at least 1 byte, got token_bytes={self.token_bytes} "
                f"and available_bytes={self.available_bytes}"
            )
        if not 0 < self.zeta <= 1:
            raise ConfigError(f"zeta must be in (0, 1], got {self.zeta}")

    def fits(self, sequences: int, input_tokens: int, iterations: int, /) -> bool:
        """Whether the KV of every row, pads included, fits at the last iteration."""
        needed = (input_tokens + iterations) * sequences * self.token_bytes
        return needed <= self.zeta * self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByRule:
    """A table of the maximum number of rows by total length (SCLS, algorithm 2).

    The default is the paper's table for DeepSpeed-Inference with LLaMA2-13B on 80 GB.
    """

    steps: tuple[tuple[int, int], ...] = ((1024, 12), (512, 22))
    """(Total length, maximum rows above it), longest first."""
    most: int = 28
    """Maximum rows of batches below all these lengths."""

    def fits(self, sequences: int, input_tokens: int, iterations: int, /) -> bool:
        total = input_tokens + iterations
        for beyond, most in self.steps:
            if total > beyond:
                return sequences <= most
        return sequences <= self.most
