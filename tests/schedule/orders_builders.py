"""Fakes for orders: services as plain values, and a machine that carries out turns with memory for all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import numpy as np

from shoal.core import SLO, Request, SyntheticPrompt
from shoal.forecast import LengthHistory
from shoal.schedule.columns import Columns
from shoal.schedule.group import ServiceTraits
from shoal.schedule.orders import Standing
from shoal.schedule.tracked import Tracked, track

SECOND = 1_000_000_000
_numbers = count()


def make_tracked(
    service: str = "a",
    *,
    number: int | None = None,
    prompt: int = 10,
    charged_s: float = 0.0,
    generated: int = 0,
    predicted: int = 1,
    ceiling: int = 1_000,
    arrival_s: float = 0.0,
    slo: SLO | None = None,
) -> Tracked:
    """A request that waits."""
    number = next(_numbers) if number is None else number
    request = Request(
        id=f"r{number}",
        service=service,
        prompt=SyntheticPrompt(prompt),
        arrival_ns=round(arrival_s * SECOND),
    )
    one = track(request, number, ceiling, ())
    one.charged_ns = round(charged_s * SECOND)
    one.generated = generated
    one.expected = prompt + generated
    one.predicted = predicted
    one.slo = slo or SLO()
    return one


@dataclass
class FakeGroup:
    """What an order sees of a service; ``finished`` are output lengths of the past."""

    service: str = "a"
    waiting: Sequence[Tracked] = ()
    running: Sequence[Tracked] = ()
    prefills: Sequence[Tracked] = ()
    last_step: int = -1
    last_prefill: int = -1
    streak: int = 0
    mean_s: float = 1.0
    alone_s: float | None = None
    deviation_s: float = 0.0
    quota: int = 8
    finished: Sequence[int] = field(default_factory=list)

    @property
    def traits(self) -> ServiceTraits:
        mean = float(np.mean(self.finished)) if self.finished else None
        return ServiceTraits(self.mean_s, self.deviation_s, mean, self.quota, self.alone_s)

    @property
    def columns(self) -> Columns:
        return Columns.of(self.running)

    def crowd(self) -> SimpleNamespace:
        history = LengthHistory(1_000, window=max(1, len(self.finished)))
        for length in self.finished:
            history.record(length)
        return SimpleNamespace(lengths=history.distribution(np.array([], dtype=np.int64)))


def standing(*groups: FakeGroup, step: int = 0) -> Standing:
    """What an order sees."""
    return Standing({group.service: group for group in groups}, step)


def decide(order, *groups: FakeGroup, step: int = 0):
    """The turns that an order lists."""
    return list(order.decide(standing(*groups, step=step), 0).turns)


def numbers(requests: Iterable[Tracked]) -> list[int]:
    """Requests by their numbers."""
    return [one.number for one in requests]


class Machine:
    """Takes an order's first turn that comes to something; a prompt takes one step, memory never lacks.

    ``open``: newcomers are let in, ``joining`` at most in one step.
    """

    def __init__(self, order, *groups: FakeGroup, joining: int = 1) -> None:
        self.order = order
        self.groups = {group.service: group for group in groups}
        self.joining = joining
        self.open = True
        self.steps = 0
        self.log: list[str] = []
        for group in groups:
            group.waiting, group.running = list(group.waiting), list(group.running)

    def step(self) -> str:
        """One step: the service's name, in capitals if it computed a prompt."""
        for turn in self.order.decide(Standing(self.groups, self.steps), 0).turns:
            group = self.groups[turn.service]
            joined = list(turn.waiting)[: self.joining] if self.open else []
            if not joined and (turn.prefill or not turn.running):
                continue
            for one in joined:
                group.waiting.remove(one)
                group.running.append(one)
            for other in self.groups.values():
                other.streak = other.streak if other is group else 0
            group.streak = 0 if joined else group.streak + 1
            group.last_step = self.steps
            if joined:
                group.last_prefill = self.steps
            self.steps += 1
            return turn.service.upper() if joined else turn.service
        raise AssertionError("no turn came to anything")

    def run(self, steps: int) -> str:
        """So many steps in one word."""
        return "".join(self.step() for _ in range(steps))
