"""What a profile measures: batches of prompts, equal or not, and prompts that join them."""

import math
from dataclasses import dataclass
from itertools import product

SPREAD = 1.5
"""Shape of the Weibull distribution of uneven prompts, whose lengths vary like those of running requests."""


@dataclass(frozen=True, slots=True)
class JoiningPrompt:
    """A prompt that joins a running batch."""

    prompt_tokens: int
    """Its length."""
    shared: int = 0
    """Tokens at its start that are in the prefix index."""


@dataclass(frozen=True, slots=True)
class Round:
    """A batch of prompts that are prefilled in one step and then decode."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    output_tokens: int
    """Tokens that each request generates."""
    joining: tuple[JoiningPrompt, ...] = ()
    """Prompts that join it one by one."""
    equal: bool = False
    """Whether it is a batch of equal prompts."""

    @property
    def sequences(self) -> int:
        """Number of its prompts."""
        return len(self.prompts)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its first step."""
        return sum(self.prompts)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens of its largest step."""
        joining = max((prompt.prompt_tokens for prompt in self.joining), default=0)
        return max(self.prefill_tokens, self.sequences + len(self.joining) + joining)


def equal_prompts(batch: int, tokens: int, output_tokens: int) -> Round:
    """A batch of ``batch`` prompts of ``tokens`` each."""
    return Round((tokens,) * batch, output_tokens, equal=True)


def uneven_prompts(batch: int, mean: int) -> tuple[int, ...]:
    """``batch`` lengths with this mean, at equally spaced quantiles of a Weibull distribution."""
    quantiles = [(-math.log1p(-(i + 0.5) / batch)) ** (1 / SPREAD) for i in range(batch)]
    scale = mean * batch / sum(quantiles)
    return tuple(max(2, round(scale * quantile)) for quantile in quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure. Batches are prefilled in one step and then decode."""

    batches: tuple[int, ...]
    """Sizes of batches of equal prompts."""
    prompts: tuple[int, ...]
    """Lengths of their prompts; all sizes and lengths are combined."""
    most_tokens: int
    """Combinations with more tokens than this are left out, and so is what does not fit in the engine."""
    decode_steps: int
    """Decode steps after each prefill."""
    uneven: tuple[tuple[int, int], ...]
    """Batches of prompts that differ, as a server's do: size and mean length."""
    prefills: tuple[int, ...]
    """Lengths of single prompts that are only prefilled."""
    mixed: tuple[tuple[int, int, tuple[JoiningPrompt, ...]], ...]
    """Batches like those of ``uneven``, with prompts that join while they decode."""
    repeats: int
    """How often everything is run."""
    slice_batches: tuple[int, ...] = (4, 8)
    """Sizes of batches that check the fits; they are not fitted."""
    uneven_slices: tuple[int, ...] = (8,)
    """The same with uneven prompts."""
    slice_prompt: int = 96
    """Length of their prompts, or its mean."""
    slice_tokens: int = 128
    """Tokens that each of their requests generates."""

    def rounds(self, max_batched_tokens: int) -> list[Round]:
        """The batches to fit; each prefill is one step of at most ``max_batched_tokens``."""
        decoded = self.decode_steps + 1
        found = [
            equal_prompts(batch, prompt, decoded) for prompt, batch in product(self.prompts, self.batches)
        ]
        found += [Round((prompt,), 1) for prompt in self.prefills]
        found += [Round(uneven_prompts(batch, mean), decoded) for batch, mean in self.uneven]
        found += [Round(uneven_prompts(batch, mean), decoded, joining) for batch, mean, joining in self.mixed]
        most = min(self.most_tokens, max_batched_tokens)
        return [batch for batch in found if batch.most_tokens <= most]

    def slices(self) -> list[Round]:
        """The batches that check the fits."""
        equal = [equal_prompts(batch, self.slice_prompt, self.slice_tokens) for batch in self.slice_batches]
        return equal + [
            Round(uneven_prompts(batch, self.slice_prompt), self.slice_tokens) for batch in self.uneven_slices
        ]


def _joining_prompts(*prompts: int) -> tuple[JoiningPrompt, ...]:
    return tuple(JoiningPrompt(tokens) for tokens in prompts)


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
        most_tokens=4096,
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
