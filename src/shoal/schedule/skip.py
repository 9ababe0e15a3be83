"""Skipping ahead: runs of decode steps that need no decision, for simulations.

While one service alone has requests, all of them decode, and nobody else can be let in, one step follows
another until something ends: nothing but counts change. A run stops before the first step that could differ,
or with the step that ends a request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.core import StepPlan

Growth = tuple[tuple[int, tuple[int, ...]], ...]
"""(sequence, further blocks) of the tables that grow in one step."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps that the scheduler would plan one after another if nothing happened between them.

    sequences: of the rows of every step. steps: how many, at least 1. context: positions that the first step
    attends, over all rows; each further step attends one more per row. until_ns: every step must begin
    before this time.
    """

    service: str
    sequences: tuple[int, ...]
    steps: int
    context: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """What the executor and the books of a simulation must know of steps that were skipped.

    sequences: of the rows. left: sequences that were to be dropped with the first of the steps. live_blocks:
    of the service during each step.
    """

    sequences: tuple[int, ...]
    left: tuple[int, ...]
    live_blocks: Sequence[int]


def plans_of(
    run: DecodeRun,
    first: int,
    steps: int,
    left: tuple[int, ...],
    growth: Mapping[int, Growth],
) -> Iterator[StepPlan]:
    """The plans that were skipped, written out; ``first`` is the number of the first."""
    for step in range(steps):
        yield StepPlan(
            number=first + step,
            service=run.service,
            sequences=run.sequences,
            new_tokens=(1,) * len(run.sequences),
            sampled=tuple(range(len(run.sequences))),
            left=left if step == 0 else (),
            grown=growth.get(step, ()),
        )
