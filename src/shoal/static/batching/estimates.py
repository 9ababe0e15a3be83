"""What a batch costs, in time and in memory: the two estimates that static batching rests on."""

from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError


class ServingTime(Protocol):
    """Time to serve a padded batch (SCLS, section 4.2)."""

    def serve(self, sequences: int, input_tokens: int, iterations: int, /) -> float:
        """Seconds for ``sequences`` rows padded to ``input_tokens``: prefill and all ``iterations``."""
        ...


class MemoryLimit(Protocol):
    """Whether a padded batch can be served without running out of memory (SCLS, section 4.3)."""

    def fits(self, sequences: int, input_tokens: int, iterations: int, /) -> bool:
        """Whether it fits; what fits must also fit with fewer rows, shorter input or fewer iterations."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByBytes:
    """(input + iterations) x rows x bytes per token, within a share of the memory (SCLS, equation 9)."""

    token_bytes: int
    """KV bytes of one token over all layers."""
    available_bytes: int
    """Memory that weights and engine leave free."""
    zeta: float = 0.9
    """Share of it that can be used; the rest is lost to fragmentation."""

    def __post_init__(self) -> None:
        """Refuse numbers without meaning; raises ConfigError."""
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
    """Most rows by the total length, for engines whose memory follows no formula (SCLS, algorithm 2).

    The default is the paper's table for DeepSpeed-Inference with LLaMA2-13B on 80 GB.
    """

    steps: tuple[tuple[int, int], ...] = ((1024, 12), (512, 22))
    """(Total length that must be exceeded, most rows then), longest first."""
    most: int = 28
    """Most rows of batches that exceed none of these lengths."""

    def fits(self, sequences: int, input_tokens: int, iterations: int, /) -> bool:
        """Whether there are few enough rows for their total length."""
        total = input_tokens + iterations
        for beyond, most in self.steps:
            if total > beyond:
                return sequences <= most
        return sequences <= self.most
