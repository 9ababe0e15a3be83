"""The grid of batches that a profile measures: equal or uneven prompts, and prompts that join them."""

import math
from dataclasses import dataclass
from itertools import product

WEIBULL_SHAPE = 1.5
"""Weibull shape of uneven prompts, whose lengths vary like those of running requests."""


@dataclass(frozen=True, slots=True)
class JoiningPrompt:
    """A prompt that joins a running batch."""

    prompt_tokens: int
    shared: int = 0
    """Leading tokens that are in the prefix cache."""


@dataclass(frozen=True, slots=True)
class BatchRound:
    """A batch of prompts that are prefilled in one step and then decode."""

    prompts: tuple[int, ...]
    output_tokens: int
    """Output length of each request."""
    joining: tuple[JoiningPrompt, ...] = ()
    """Prompts that join the batch one by one."""
    equal: bool = False
    """Whether it counts as a batch of equal prompts."""

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    @property
    def prefill_tokens(self) -> int:
        return sum(self.prompts)

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens in its largest step."""
        joining = max((prompt.prompt_tokens for prompt in self.joining), default=0)
        return max(self.prefill_tokens, self.sequences + len(self.joining) + joining)


def equal_prompts(batch: int, tokens: int, output_tokens: int) -> BatchRound:
    return BatchRound((tokens,) * batch, output_tokens, equal=True)


def uneven_prompts(batch: int, mean: int) -> tuple[int, ...]:
    """``batch`` lengths with this mean: equally spaced quantiles of a Weibull distribution."""
    quantiles = [(-math.log1p(-(i + 0.5) / batch)) ** (1 / WEIBULL_SHAPE) for i in range(batch)]
    scale = mean * batch / sum(quantiles)
    return tuple(max(2, round(scale * quantile)) for quantile in quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Batches to measure. Each is prefilled in one step and then decodes."""

    batches: tuple[int, ...]
    """Sizes of batches of equal prompts."""
    prompts: tuple[int, ...]
    """Lengths of equal prompts; all sizes and lengths are combined."""
    max_tokens: int
    """Batches with more tokens than this are excluded, as are those that do not fit in the engine."""
    decode_steps: int
    """Decode steps after each prefill."""
    uneven: tuple[tuple[int, int], ...]
    """Batches of uneven prompts, as in a server: size and mean length."""
    prefills: tuple[int, ...]
    """Lengths of single prompts without decodes."""
    mixed: tuple[tuple[int, int, tuple[JoiningPrompt, ...]], ...]
    """Batches of uneven prompts, with prompts that join while they decode: size, mean length, joining."""
    repeats: int
    """Number of runs of everything."""
    slice_batches: tuple[int, ...] = (4, 8)
    """Sizes of batches that check the fits, and are not fitted."""
    uneven_slices: tuple[int, ...] = (8,)
    """Sizes of such batches with uneven prompts."""
    slice_prompt: int = 96
    """Mean prompt length of the batches that check the fits."""
    slice_tokens: int = 128
    """Output length of their requests."""

    def rounds(self, max_batched_tokens: int) -> list[BatchRound]:
        """Batches to fit; each prefill is one step of at most ``max_batched_tokens``."""
        decoded = self.decode_steps + 1
        found = [
            equal_prompts(batch, prompt, decoded) for prompt, batch in product(self.prompts, self.batches)
        ]
        found += [BatchRound((prompt,), 1) for prompt in self.prefills]
        found += [BatchRound(uneven_prompts(batch, mean), decoded) for batch, mean in self.uneven]
        found += [
            BatchRound(uneven_prompts(batch, mean), decoded, joining) for batch, mean, joining in self.mixed
        ]
        most = min(self.max_tokens, max_batched_tokens)
        return [batch for batch in found if batch.max_tokens <= most]

    def slices(self) -> list[BatchRound]:
        """The batches that check the fits."""
        equal = [equal_prompts(batch, self.slice_prompt, self.slice_tokens) for batch in self.slice_batches]
        return equal + [
            BatchRound(uneven_prompts(batch, self.slice_prompt), self.slice_tokens)
            for batch in self.uneven_slices
        ]


def _joining_prompts(*prompts: int) -> tuple[JoiningPrompt, ...]:
    return tuple(JoiningPrompt(tokens) for tokens in prompts)


GRIDS = {
    "quick": Grid(
        batches=(1, 2, 4, 8, 16),
        prompts=(16, 128, 512),
        max_tokens=1024,
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
            (1, 48, _joining_prompts(16, 96, 256)),
            (4, 64, (*_joining_prompts(24, 384), JoiningPrompt(96, 64))),
            (8, 64, (*_joining_prompts(16, 64), JoiningPrompt(192, 96), JoiningPrompt(160))),
            (16, 48, _joining_prompts(32, 128, 256)),
            (24, 36, _joining_prompts(48, 96, 192)),
        ),
        repeats=3,
    ),
    "full": Grid(
        batches=(1, 2, 4, 8, 16, 32, 64),
        prompts=(16, 64, 128, 256, 512, 1024, 2048),
        max_tokens=4096,
        decode_steps=18,
        uneven=(
            *((batch, mean) for batch in (2, 3, 4, 6, 8, 12, 16, 24, 32) for mean in (48, 120)),
            *((2, 800), (4, 400), (8, 240), (16, 240), (48, 60), (64, 60)),
        ),
        prefills=(2, 4, 8, 12, 24, 32, 48, 64, 96, 192, 256, 384, 768, 1536),
        mixed=(
            (1, 48, _joining_prompts(16, 96, 256)),
            (2, 64, _joining_prompts(8, 48, 512)),
            (4, 64, (*_joining_prompts(24, 384), JoiningPrompt(96, 64))),
            (4, 240, (*_joining_prompts(256, 1024), JoiningPrompt(512, 256))),
            (8, 64, (*_joining_prompts(16, 64), JoiningPrompt(192, 96), JoiningPrompt(160))),
            (16, 48, _joining_prompts(32, 128, 256, 512)),
            (24, 36, _joining_prompts(48, 96, 192)),
            (48, 40, _joining_prompts(64, 256)),
        ),
        repeats=5,
        slice_batches=(4, 8),
        uneven_slices=(8, 24),
    ),
}
"""Grids by name: ``quick`` takes about a minute for a small model on a CPU, ``full`` several."""
