"""What orders have in common that give every request a priority."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.core import ConfigError
from shoal.schedule.group import GroupView
from shoal.schedule.orders.protocol import Decision, Standing, Turn
from shoal.schedule.tracked import Tracked

Urgency = tuple[float, int]
"""Priority and number of submission: equals are served first come, first served."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One service's requests, most urgent first.

    running: all of them; prompts and decodes: those within their prompt, and those beyond. prompt_urgency: of
    the most urgent that could be prefilled, the head of the queue included; decode_urgency: of the most
    urgent decode. None: there is nobody.
    """

    group: GroupView
    running: list[Tracked]
    prompts: list[Tracked]
    decodes: list[Tracked]
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
    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """See ``Order``."""

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
        running = list(group.running)
        requests = [*running, group.waiting[0]] if group.waiting else running
        priorities = self.priorities(group, requests)
        # Sorting is stable: equals stay in the order of admission.
        places = sorted(range(len(running)), key=priorities.__getitem__)
        ranked = [running[at] for at in places]
        begun = set(group.prefills)
        prompts = [at for at in places if running[at] in begun] if begun else []
        decodes = [at for at in places if running[at] not in begun] if begun else places
        heads = prompts[:1] + ([len(running)] if group.waiting else [])
        return Ranked(
            group,
            ranked,
            [running[at] for at in prompts],
            [running[at] for at in decodes] if begun else ranked,
            min(((priorities[at], requests[at].number) for at in heads), default=None),
            min(((priorities[at], requests[at].number) for at in decodes[:1]), default=None),
        )


def require(holds: bool, order: str, knob: str, rule: str, value: object) -> None:
    """Refuse a knob without meaning; raises ConfigError."""
    if not holds:
        raise ConfigError(f"order {order}: {knob} {rule}, got {value!r}")


def require_one_of(value: str, order: str, knob: str, possible: Iterable[str]) -> None:
    """Refuse a choice that there is not; raises ConfigError."""
    possible = tuple(possible)
    require(value in possible, order, knob, f"must be one of {', '.join(possible)}", value)
