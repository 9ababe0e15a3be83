"""What a profile measures: batches of prompts, equal or not, and newcomers that join them."""

import math
from dataclasses import dataclass
from itertools import product

SPREAD = 1.5
"""Shape of the Weibull distribution of uneven prompts: their lengths vary as those of running requests do."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A prompt that joins a running batch. shared: tokens at its start that are in the prefix index."""

    prompt_tokens: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A batch of prompts that are prefilled in one step and then decode; newcomers join one by one.

    prompts: tokens of each. output_tokens: of every request. equal: whether it is a padded batch of the grid.
    """

    prompts: tuple[int, ...]
    output_tokens: int
    newcomers: tuple[Newcomer, ...] = ()
    equal: bool = False

    @property
    def sequences(self) -> int:
        """Requests of the batch."""
        return len(self.prompts)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its first step."""
        return sum(self.prompts)

    @property
    def most_tokens(self) -> int:
        """Tokens of its largest step, at most."""
        joining = max((one.prompt_tokens for one in self.newcomers), default=0)
        return max(self.prefill_tokens, self.sequences + len(self.newcomers) + joining)


def equal_prompts(batch: int, tokens: int, output_tokens: int) -> Round:
    """A batch of ``batch`` prompts of ``tokens`` each."""
    return Round((tokens,) * batch, output_tokens, equal=True)


def uneven_prompts(batch: int, mean: int) -> tuple[int, ...]:
    """``batch`` lengths with this mean, spaced as the quantiles of a Weibull distribution."""
    quantiles = [(-math.log1p(-(i + 0.5) / batch)) ** (1 / SPREAD) for i in range(batch)]
    scale = mean * batch / sum(quantiles)
    return tuple(max(2, round(scale * quantile)) for quantile in quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure. Batches are prefilled in one step and then decode.

    batches, prompts: batch sizes and lengths of equal prompts; pairs of more than ``most_tokens`` tokens
    together, and what does not fit in the engine, are left out. uneven: batches of prompts that differ, and
    their mean, as a server's do. prefills: single prompts that only are prefilled. mixed: uneven batches, and
    newcomers that join while they decode. decode_steps: decode steps after each prefill. repeats: how often
    everything is run. slice_batches, slice_prompt, slice_tokens: batches that generate that many tokens each,
    for checking fits that have not seen them; uneven_slices: the same with uneven prompts of that mean.
    """

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    most_tokens: int
    decode_steps: int
    uneven: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]
    mixed: tuple[tuple[int, int, tuple[Newcomer, ...]], ...]
    repeats: int
    slice_batches: tuple[int, ...] = (4, 8)
    uneven_slices: tuple[int, ...] = (8,)
    slice_prompt: int = 96
    slice_tokens: int = 128

    def rounds(self, max_batched_tokens: int) -> list[Round]:
        """What to fit; each prefill is one step of at most ``max_batched_tokens``."""
        decoded = self.decode_steps + 1
        found = [
            equal_prompts(batch, prompt, decoded) for prompt, batch in product(self.prompts, self.batches)
        ]
        found += [Round((prompt,), 1) for prompt in self.prefills]
        found += [Round(uneven_prompts(batch, mean), decoded) for batch, mean in self.uneven]
        found += [
            Round(uneven_prompts(batch, mean), decoded, newcomers) for batch, mean, newcomers in self.mixed
        ]
        most = min(self.most_tokens, max_batched_tokens)
        return [one for one in found if one.most_tokens <= most]

    def slices(self) -> list[Round]:
        """What to check the fits with."""
        equal = [equal_prompts(batch, self.slice_prompt, self.slice_tokens) for batch in self.slice_batches]
        return equal + [
            Round(uneven_prompts(batch, self.slice_prompt), self.slice_tokens) for batch in self.uneven_slices
        ]


def _newcomers(*prompts: int) -> tuple[Newcomer, ...]:
    return tuple(Newcomer(tokens) for tokens in prompts)


GRIDS = {
    "quick": Grid(
        batches=(1, 2, 4, 8, 16),
        prompts=(16, 128, 512),
        most_tokens=1024,
        decode_steps=9,
        uneven=(
            (2, 48),
            (3, 96),
            (4, 64),
            (4, 240),
            (6, 96),
            (8, 48),
            (8, 120),
            (12, 64),
            (16, 60),
            (24, 40),
            (32, 30),
        ),
        prefills=(4, 8, 24, 32, 48, 64, 96, 192, 256, 384, 768),
        mixed=(
            (1, 48, _newcomers(16, 96, 256)),
            (4, 64, (*_newcomers(24, 384), Newcomer(96, 64))),
            (8, 64, (*_newcomers(16, 64), Newcomer(192, 96), Newcomer(160))),
            (16, 48, _newcomers(32, 128, 256)),
            (24, 36, _newcomers(48, 96, 192)),
        ),
        repeats=3,
    ),
    "full": Grid(
        batches=(1, 2, 4, 8, 16, 32, 64),
        prompts=(16, 64, 128, 256, 512, 1024, 2048),
        most_tokens=4096,
        decode_steps=18,
        uneven=(
            *((batch, mean) for batch in (2, 3, 4, 6, 8, 12, 16, 24, 32) for mean in (48, 120)),
            *((2, 800), (4, 400), (8, 240), (16, 240), (48, 60), (64, 60)),
        ),
        prefills=(2, 4, 8, 12, 24, 32, 48, 64, 96, 192, 256, 384, 768, 1536),
        mixed=(
            (1, 48, _newcomers(16, 96, 256)),
            (2, 64, _newcomers(8, 48, 512)),
            (4, 64, (*_newcomers(24, 384), Newcomer(96, 64))),
            (4, 240, (*_newcomers(256, 1024), Newcomer(512, 256))),
            (8, 64, (*_newcomers(16, 64), Newcomer(192, 96), Newcomer(160))),
            (16, 48, _newcomers(32, 128, 256, 512)),
            (24, 36, _newcomers(48, 96, 192)),
            (48, 40, _newcomers(64, 256)),
        ),
        repeats=5,
        slice_batches=(4, 8),
        uneven_slices=(8, 24),
    ),
}
"""Grids by name: ``quick`` takes about a minute for a small model on a CPU, ``full`` several."""
