"""What orders have in common that give every request a priority."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError
from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView
from shoal.schedule.orders.protocol import Decision, Standing, Turn
from shoal.schedule.running import Lineup
from shoal.schedule.tracked import Tracked

FloatArray = npt.NDArray[np.floating[Any]]
Urgency = tuple[float, int]
"""Priority and number of submission: equals are served first come, first served."""

POWERS: npt.NDArray[np.int64] = 1 << np.arange(63)
"""Of two, as far as they go."""
LONGEST_NS = 1 << 61
"""Longer times would overflow when doubled."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One service's requests, most urgent first.

    running: all of them. prompt_urgency: of the most urgent that could be prefilled, the head of the queue
    included; decode_urgency: of the most urgent of those beyond their prompts. None: there is nobody.
    """

    group: GroupView
    running: Lineup
    prompt_urgency: Urgency | None
    decode_urgency: Urgency | None


@dataclass(frozen=True, slots=True)
class Offer:
    """A turn, and the urgency of the request for whose sake it is offered."""

    urgency: Urgency
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPriority(ABC):
    """The most urgent request of all picks the service that steps.

    If it waits, or is within its prompt, the step must compute a prompt, otherwise the next most urgent
    picks. In either case all of its service take part: decodes, then prompts begun, then newcomers, each most
    urgent first. Since every service with requests is offered, something runs whatever memory refuses.

    Of the waiting only the head of each queue is looked at: a queue is kept by ``rank``.
    """

    steady: ClassVar[bool] = False
    reads_lengths: ClassVar[bool] = False

    @abstractmethod
    def rank(self, one: Tracked, group: GroupView) -> float:
        """See ``Order``."""

    @abstractmethod
    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """Of each request of a service, by their columns: the smallest is served first."""

    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """See ``Order``."""
        columns = group.columns if requests is group.running else Columns.of(requests)
        values: list[float] = self.urgencies(group, columns).tolist()
        return values

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """What every service offers, by urgency."""
        offers: list[Offer] = []
        for group in standing.groups.values():
            if group.running or group.waiting:
                offers += self.offers(self._ranked(group))
        offers.sort(key=lambda offer: offer.urgency)
        return Decision([offer.turn for offer in offers])

    def offers(self, ranked: Ranked) -> list[Offer]:
        """One service's turns: for the sake of a prompt, and for the sake of a decode."""
        service, waiting = ranked.group.service, ranked.group.waiting
        offers = []
        # Both turns carry the very same list, so that the scheduler adds up its demand only once.
        if ranked.prompt_urgency is not None:
            turn = Turn(service, ranked.running, waiting, prefill=True)
            offers.append(Offer(ranked.prompt_urgency, turn))
        if ranked.decode_urgency is not None:
            offers.append(Offer(ranked.decode_urgency, Turn(service, ranked.running, waiting)))
        return offers

    def _ranked(self, group: GroupView) -> Ranked:
        columns = group.columns
        running = columns.requests.copy()
        asked = columns.plus(group.waiting[0]) if group.waiting else columns
        urgencies = self.urgencies(group, asked)
        of_running = urgencies[: len(running)]
        prompts = [running.index(one) for one in group.prefills]

        def urgency(at: int) -> Urgency:
            return float(urgencies[at]), asked.requests[at].number

        # Of equals the one admitted first.
        heads = [prompts[int(of_running[prompts].argmin())]] if prompts else []
        if group.waiting:
            heads.append(len(running))
        return Ranked(
            group,
            Lineup(running, of_running),
            min(map(urgency, heads), default=None),
            urgency(_first_but(prompts, of_running)) if len(running) > len(prompts) else None,
        )


def _first_but(those: Sequence[int], urgencies: FloatArray) -> int:
    """The place of the smallest urgency that is at none of ``those`` places; of equals the first."""
    if not those:
        return int(urgencies.argmin())
    others = np.delete(np.arange(len(urgencies)), those)
    return int(others[urgencies[others].argmin()])


def require(holds: bool, order: str, knob: str, rule: str, value: object) -> None:
    """Refuse a knob without meaning; raises ConfigError."""
    if not holds:
        raise ConfigError(f"order {order}: {knob} {rule}, got {value!r}")


def require_one_of(value: str, order: str, knob: str, possible: Iterable[str]) -> None:
    """Refuse a choice that there is not; raises ConfigError."""
    possible = tuple(possible)
    require(value in possible, order, knob, f"must be one of {', '.join(possible)}", value)
