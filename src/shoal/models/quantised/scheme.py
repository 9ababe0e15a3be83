"""Scheme: how a quantised matrix is stored, and Quantisation: which matrices have which scheme."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import regex

from shoal.core import ModelUnsupported

WHOLE = 0
"""As a side of a block: all rows, or all inputs."""


class Storage(Enum):
    """Which tensors stand for a matrix, and how its numbers lie in them; see ``assemble`` for shapes."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    PLAIN = "plain"
    """An element of its own for each number."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A matrix [outputs, inputs] as (numbers - zeros) * scales, with a scale for each block of numbers."""

    storage: Storage
    bits: int
    """Of a number."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale, each WHOLE for all."""
    symmetric: bool = True
    """Whether the zero is the middle of the range."""
    is_float: bool = False
    """Whether numbers are float8 (e4m3), not integers."""
    scattered: bool = False
    """Whether the inputs of a group may lie anywhere; a tensor then has the group of each."""
    zeros_less_one: bool = False
    """Whether stored zeros are less by one than those that are meant (GPTQ's first format)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules and their scheme."""

    names: "regex.Pattern[str]"
    """Matches from the start of a module's name."""
    scheme: Scheme | None
    """None: these modules are not quantised."""

    def matches(self, module: str) -> bool:
        """Whether the rule is for the module with this name; raises ModelUnsupported if that takes too long.

        Patterns come from config.json, and some would take for ever.
        """
        try:
            return self.names.match(module, timeout=_LONGEST_MATCH_S) is not None
        except TimeoutError:
            raise unsupported(
                f"the pattern {self.names.pattern!r:.80}, which takes too long", "simple patterns"
            ) from None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a folder are quantised."""

    label: str
    """For users: ``AWQ-INT4``."""
    rules: Sequence[Rule]
    """The first that matches counts."""

    def scheme_of(self, module: str) -> Scheme | None:
        """Scheme of the module with this name in the checkpoint; None if it is not quantised."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)


ALL = regex.compile("")
"""Matches every name."""
_LONGEST_MATCH_S = 0.2
_LONGEST_PATTERN = 1000
"""Characters."""


def unsupported(found: str, possible: str) -> ModelUnsupported:
    """The error for a quantisation that is not read."""
    return ModelUnsupported(f"its config.json has {found}, which is not read; possible: {possible}")


def pattern(text: str) -> "regex.Pattern[str]":
    """A regular expression of config.json; raises ModelUnsupported if it is none."""
    if len(text) > _LONGEST_PATTERN:
        raise unsupported(f"a pattern of {len(text)} characters", f"{_LONGEST_PATTERN}")
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise unsupported(f"the pattern {text!r:.80} ({error})", "regular expressions") from None


def integer(config: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of these fields that is given; raises ModelUnsupported if it is no integer."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int:
                raise unsupported(f"{name}: {value!r:.40}", "an integer")
            return value
    return default


def group_block(size: int) -> tuple[int, int]:
    """The block of a group of ``size`` inputs of an output, -1 for all; raises ModelUnsupported."""
    if size != -1 and size < 1:
        raise unsupported(f"group_size: {size}", "-1 and positive numbers")
    return 1, WHOLE if size == -1 else size
