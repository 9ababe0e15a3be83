"""What a profile measures: batches of equal prompts."""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Round:
    """A batch of equal prompts, and perhaps one newcomer after the first decode step."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    newcomer: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its first step."""
        return self.sequences * self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure: batches of equal prompts, each prefilled in one step and then decoded.

    batches, prompts: batch sizes and prompt lengths; pairs of more than ``most_tokens`` tokens together, and
    those that do not fit in the engine, are left out. decode_steps: decode steps after each prefill.
    mixed: (decoding requests, their prompt tokens, prompt tokens of a newcomer that joins them).
    repeats: how often everything is run; the median counts. slice_batches, slice_prompt, slice_tokens:
    batches that generate that many tokens each, for checking a fit that has not seen them.
    """

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    most_tokens: int
    decode_steps: int
    mixed: tuple[tuple[int, int, int], ...]
    repeats: int
    slice_batches: tuple[int, ...] = (4, 8)
    slice_prompt: int = 96
    slice_tokens: int = 128

    def rounds(self, max_batched_tokens: int) -> list[Round]:
        """What to fit; each prefill is one step of at most ``max_batched_tokens``."""
        most = min(self.most_tokens, max_batched_tokens)
        decoded = self.decode_steps + 1
        return [
            Round(batch, prompt, decoded)
            for prompt, batch in product(self.prompts, self.batches)
            if batch * prompt <= most
        ] + [
            Round(batch, prompt, decoded, newcomer)
            for batch, prompt, newcomer in self.mixed
            if max(batch * prompt, batch + newcomer) <= most
        ]

    def slices(self) -> list[Round]:
        """What to check the fit with."""
        return [Round(batch, self.slice_prompt, self.slice_tokens) for batch in self.slice_batches]


GRIDS = {
    "quick": Grid(
        batches=(1, 2, 4, 8, 16),
        prompts=(16, 128, 512),
        most_tokens=1024,
        decode_steps=9,
        mixed=((4, 32, 64), (8, 16, 128)),
        repeats=3,
    ),
    "full": Grid(
        batches=(1, 2, 4, 8, 16, 32, 64),
        prompts=(16, 64, 128, 256, 512, 1024, 2048),
        most_tokens=4096,
        decode_steps=18,
        mixed=((4, 32, 64), (8, 64, 128), (16, 64, 32), (4, 256, 256), (2, 16, 512)),
        repeats=5,
    ),
}
"""Grids by name: ``quick`` takes under a minute for a small model on a CPU, ``full`` several."""
