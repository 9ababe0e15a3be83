"""Successive halving: many candidates on little data, the best on more, the last on all of it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.core import ConfigError

Candidate = TypeVar("Candidate", bound=Hashable)
KEEP = 3
"""Each round has 1/KEEP of the candidates and KEEP times the data of the round before."""


@dataclass(frozen=True, slots=True)
class Round:
    """Size of one round."""

    candidates: int
    share: float
    """Share of the data."""


@dataclass(frozen=True, slots=True)
class Ranked(Generic[Candidate]):
    """Result of one round."""

    share: float
    """As in ``Round``."""
    candidates: Sequence[Candidate]
    """Best first."""
    losses: Sequence[float]
    """In the order of ``candidates``."""


def plan_rounds(candidates: int, least_share: float, keep: int = KEEP) -> list[Round]:
    """The rounds for a number of candidates; the last is on all data.

    least_share: smallest share of the data that gives a useful ranking, above 0. If that allows few rounds,
    the last has more candidates. Raises ConfigError for no candidates.
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
    """Run the rounds; yields the result of each.

    evaluate: loss of each candidate on a share of the data, smaller is better; ties go to the earlier one.
    always: candidates that are in every round, so that the last round compares them with the best.
    Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
    2016, algorithm 1.
    """
    ranking = list(dict.fromkeys([*always, *candidates]))
    for each in rounds:
        chosen = list(dict.fromkeys([*ranking[: each.candidates], *always]))
        losses = evaluate(chosen, each.share)
        order = sorted(range(len(chosen)), key=losses.__getitem__)
        ranking = [chosen[index] for index in order]
        yield Ranked(each.share, ranking, [losses[index] for index in order])
