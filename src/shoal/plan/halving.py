"""Successive halving: many candidates on a little, the best of them on more, the very best on everything."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.core import ConfigError

Candidate = TypeVar("Candidate", bound=Hashable)
KEEP = 3
"""One of so many candidates goes on to the next round, which looks at so many times as much."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round, before it is played."""

    candidates: int
    """How many take part."""
    share: float
    """Of everything there is to look at."""


@dataclass(frozen=True, slots=True)
class Ranked(Generic[Candidate]):
    """A round's outcome."""

    share: float
    """As in ``Round``."""
    candidates: Sequence[Candidate]
    """Those that took part, best first."""
    losses: Sequence[float]
    """Of each, in the same order."""


def rounds_of(candidates: int, least_share: float, keep: int = KEEP) -> list[Round]:
    """The rounds for so many candidates, the last of them on everything.

    least_share: what the first round must at least look at for its ranking to mean anything, above 0. Where
    that allows few rounds, the last has more candidates. Raises ConfigError for no candidates.
    """
    if candidates < 1:
        raise ConfigError("there is nothing to choose from")
    rounds = [Round(candidates, 1.0)]
    while rounds[0].share / keep >= least_share and rounds[-1].candidates > 1:
        rounds = [Round(each.candidates, each.share / keep) for each in rounds]
        rounds.append(Round(-(-rounds[-1].candidates // keep), 1.0))
    return rounds


def successive_halving(
    candidates: Sequence[Candidate],
    rounds: Sequence[Round],
    evaluate: Callable[[Sequence[Candidate], float], Sequence[float]],
    always: Sequence[Candidate] = (),
) -> Iterator[Ranked[Candidate]]:
    """Play the rounds; the outcome of each when it is over.

    evaluate: the loss of each candidate on a share of everything, smaller is better; of equal ones the
    earlier counts as better. always: candidates that take part in every round, beside those that won their
    place, so that the last round compares them with the best.
    Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
    2016, algorithm 1.
    """
    ranking = list(dict.fromkeys([*always, *candidates]))
    for each in rounds:
        chosen = list(dict.fromkeys([*ranking[: each.candidates], *always]))
        losses = evaluate(chosen, each.share)
        order = sorted(range(len(chosen)), key=losses.__getitem__)
        ranking = [chosen[at] for at in order]
        yield Ranked(each.share, ranking, [losses[at] for at in order])
